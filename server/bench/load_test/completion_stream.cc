#include "server/bench/load_test/completion_stream.h"

#include <limits>

#include "base/error_text.h"
#include "server/base/json.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxCodeBytes = 64;

const Json* Find(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::optional<int64_t> Count(const Json& object, const char* name) {
  const Json* value = Find(object, name);
  if (value == nullptr || !value->is_number_unsigned()) return std::nullopt;
  const uint64_t count = value->get<uint64_t>();
  if (count > uint64_t{std::numeric_limits<int32_t>::max()}) return std::nullopt;
  return static_cast<int64_t>(count);
}

std::string CodeOf(const Json& error) {
  for (const char* name : {"code", "type"}) {
    const Json* value = Find(error, name);
    if (value != nullptr && value->is_string() && !value->get_ref<const std::string&>().empty()) {
      return Printable(value->get_ref<const std::string&>(), kMaxCodeBytes);
    }
  }
  return "error";
}

// Returns whether the choice in a chunk contains generated output. A chunk without text counts if
// it is not the last one: its token holds only a part of a character. The last chunk of a choice
// can be empty and then does not count.
bool BringsOutput(const Json& choice, bool finished) {
  const Json* text = Find(choice, "text");
  if (text != nullptr && text->is_string() && !text->get_ref<const std::string&>().empty()) {
    return true;
  }
  const Json* ids = Find(choice, "token_ids");
  if (ids != nullptr && ids->is_array() && !ids->empty()) return true;
  return !finished;
}

}  // namespace

std::string ErrorCode(std::string_view body) {
  const Json json = Json::parse(body, nullptr, /*allow_exceptions=*/false);
  const Json* error = Find(json, "error");
  return error == nullptr ? "error" : CodeOf(*error);
}

void CompletionStream::Feed(std::string_view bytes) {
  new_arrivals_ = 0;
  if (!sse_.Feed(bytes, [this](std::string_view data) { OnEvent(data); }) && error_.empty()) {
    error_ = "malformed event stream";
  }
  arrivals_ += new_arrivals_;
}

void CompletionStream::OnEvent(std::string_view data) {
  if (done_) {
    duplicate_ = true;
    return;
  }
  if (data == "[DONE]") {
    done_ = true;
    return;
  }
  const Json json = Json::parse(data, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    if (error_.empty()) error_ = "malformed event";
    return;
  }
  if (const Json* error = Find(json, "error")) {
    if (!error_.empty()) duplicate_ = true;
    error_ = "stream error " + CodeOf(*error);
    return;
  }
  if (const Json* choices = Find(json, "choices"); choices != nullptr && choices->is_array()) {
    for (const Json& choice : *choices) {
      const bool finished = Find(choice, "finish_reason") != nullptr;
      if (finished_) {
        duplicate_ = true;
        continue;
      }
      new_arrivals_ += BringsOutput(choice, finished);
      finished_ = finished;
    }
  }
  if (const Json* usage = Find(json, "usage")) {
    prompt_tokens_ = Count(*usage, "prompt_tokens");
    output_tokens_ = Count(*usage, "completion_tokens");
  }
}

}  // namespace moeserve::server

// Chat templates: a template, "\n\n\n" and a JSON object with the members "messages", a list, and
// others, which are variables of the client.

#include <chrono>
#include <string>
#include <utility>

#include "engine/text/chat/chat_template.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz.h"

namespace moeserve::chat {
namespace {

using OrderedJson = nlohmann::ordered_json;

// A character that occurs in no template, so that its place in the output shows what comes from the
// client. The template could make it only by an escape or from its number.
constexpr std::string_view kMark = "\U0010FFFD";

// Appends the mark to every string except roles.
void Mark(OrderedJson& value) {
  if (value.is_string()) {
    value = value.get<std::string>() + std::string(kMark);
  } else if (value.is_array()) {
    for (OrderedJson& item : value) Mark(item);
  } else if (value.is_object()) {
    for (auto& [key, item] : value.items()) {
      if (key != "role") Mark(item);
    }
  }
}

RenderInput MakeInput(std::string_view text) {
  RenderInput out;
  out.trusted = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
  out.now = 1'700'000'000;
  // The time is not limited, because a process that waits for its turn could fail the second time.
  out.limits.max_time = std::chrono::hours(1);
  out.limits.max_steps = 200'000;
  out.limits.max_bytes = size_t{16} << 20;
  out.limits.max_output_bytes = size_t{256} << 10;
  OrderedJson variables = OrderedJson::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!variables.is_object()) {
    variables = {{"messages", {{{"role", "user"}, {"content", std::string(text.substr(0, 64))}}}}};
    // The server takes texts from JSON, which is UTF-8.
    const std::string dumped =
        variables.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
    variables = OrderedJson::parse(dumped);
  }
  for (auto& [name, value] : variables.items()) {
    Mark(value);
    if (name != "messages") {
      out.untrusted[name] = value;
    } else if (value.is_array()) {
      for (OrderedJson& message : value) {
        if (message.is_object()) out.messages.push_back(message);
      }
    }
  }
  return out;
}

bool IsBoundary(std::string_view text, size_t at) {
  return at == text.size() || (text[at] & 0xC0) != 0x80;
}

void CheckSpans(const RenderedPrompt& prompt, bool has_mark) {
  size_t end = 0;
  for (const TextSpan& span : prompt.trusted) {
    MOESERVE_CHECK(span.begin >= end && span.begin < span.end && span.end <= prompt.text.size(),
                   "spans are ascending and disjoint");
    end = span.end;
    MOESERVE_CHECK(IsBoundary(prompt.text, span.begin) && IsBoundary(prompt.text, span.end),
                   "spans have whole characters");
    const std::string_view part =
        std::string_view(prompt.text).substr(span.begin, span.end - span.begin);
    MOESERVE_CHECK(has_mark || part.find(kMark) == std::string_view::npos,
                   "the client's text is not trusted");
  }
}

// Returns whether a template could spell the mark itself.
bool CanMakeMark(std::string_view source) {
  return source.find(kMark) != std::string_view::npos ||
         source.find('\\') != std::string_view::npos || source.find("%c") != std::string_view::npos;
}

}  // namespace
}  // namespace moeserve::chat

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;        // NOLINT(google-build-using-namespace)
  using namespace moeserve::chat;  // NOLINT(google-build-using-namespace)
  testing::Input input(data, size);
  const std::string_view source = input.Section();
  const auto compiled = ChatTemplate::Compile(source);
  if (!compiled.ok()) return 0;
  const RenderInput variables = MakeInput(input.rest());
  const auto prompt = (*compiled)->Render(variables);
  if (!prompt.ok()) return 0;
  testing::CountAccepted();
  MOESERVE_CHECK(prompt->text.size() <= variables.limits.max_output_bytes, "the limit on output");
  CheckSpans(*prompt, CanMakeMark(source));
  const auto again = (*compiled)->Render(variables);
  MOESERVE_CHECK(again.ok() && again->text == prompt->text && again->trusted == prompt->trusted,
                 "a template renders the same text again");
  return 0;
}

#include "base/strict_json.h"

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error_text.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

// Builds the JSON value during parsing, so that a limit stops the work at once and a repeated key
// is detected before it replaces the first value.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Builder(const JsonLimits& limits, const TakeMemory& take_memory)
      : limits_(limits), take_memory_(take_memory) {}
  ~Builder() override { ClearJson(root_); }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  bool null() override { return Put(nullptr) != nullptr; }
  bool boolean(bool value) override { return Put(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Put(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Put(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return Put(value) != nullptr;
  }
  bool string(string_t& value) override { return Put(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return Fail("binary values are not JSON"); }

  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    if (open_.back()->contains(name)) {
      return Fail(Concat("key ", Quoted(name), " appears twice in ", Where()));
    }
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    // Removes the library's error id, in brackets, from the front of its message.
    std::string_view what = error.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos)
      what.remove_prefix(end + 2);
    return Fail(Printable(what, 240));
  }

  Json& root() { return root_; }
  const std::string& error() const { return error_; }
  bool out_of_memory() const { return out_of_memory_; }

 private:
  template <typename Value>
  Json* Put(Value&& value) {
    if (++values_ > limits_.max_values) {
      Fail(Concat("expected at most ", limits_.max_values, " values, found more"));
      return nullptr;
    }
    if (!Charge(value)) return nullptr;
    if (open_.empty()) {
      root_ = std::forward<Value>(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::forward<Value>(value));
      return &parent.back();
    }
    Json& slot = parent[key_];
    slot = std::forward<Value>(value);
    return &slot;
  }

  // Charges what adding `value` to the innermost container allocates.
  template <typename Value>
  bool Charge(const Value& value) {
    if (!take_memory_) return true;
    // A heap block's own overhead; a node of std::map with its links.
    constexpr size_t kBlock = 16;
    constexpr size_t kNode = 32 + kBlock;
    size_t bytes = 0;
    if constexpr (std::is_same_v<Value, std::string>) {
      bytes += kBlock + sizeof(std::string) + value.capacity();
    } else if constexpr (std::is_same_v<Value, Json>) {
      bytes += kBlock + sizeof(Json::object_t);
    }
    if (!open_.empty() && open_.back()->is_array()) {
      const auto& list = open_.back()->get_ref<const Json::array_t&>();
      // The old elements live until the new ones are in place.
      if (list.size() == list.capacity()) bytes += (2 * list.size() + 1) * sizeof(Json) + kBlock;
    } else {
      bytes += kNode + sizeof(std::string) + sizeof(Json) + key_.capacity();
    }
    uncharged_ += bytes;
    if (uncharged_ < kChargeStep) return true;
    if (take_memory_(std::exchange(uncharged_, 0))) return true;
    out_of_memory_ = true;
    return Fail("the values need more memory than there is");
  }

  bool Open(Json container) {
    if (static_cast<int>(open_.size()) >= limits_.max_depth) {
      return Fail(Concat("expected at most ", limits_.max_depth, " levels of nesting, found more"));
    }
    std::string name;
    if (!open_.empty()) {
      name = open_.back()->is_array() ? Concat('[', open_.back()->size(), ']') : Concat('.', key_);
    }
    Json* placed = Put(std::move(container));
    if (placed == nullptr) return false;
    open_.push_back(placed);  // the pointer stays valid, because only the innermost container grows
    path_.push_back(std::move(name));
    return true;
  }

  bool Close() {
    open_.pop_back();
    path_.pop_back();
    return true;
  }

  std::string Where() const {
    std::string path;
    for (const std::string& name : path_) path.append(name);
    if (path.empty()) return "the top-level object";
    return Quoted(path[0] == '.' ? std::string_view(path).substr(1) : path);
  }

  bool Fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }

  static constexpr size_t kChargeStep = 16 << 10;

  const JsonLimits& limits_;
  const TakeMemory& take_memory_;
  Json root_;
  std::vector<Json*> open_;
  std::vector<std::string> path_;  // key or index of each open container in its parent
  std::string key_;
  size_t values_ = 0;
  size_t uncharged_ = 0;  // bytes of memory; charged when they reach kChargeStep
  bool out_of_memory_ = false;
  std::string error_;
};

}  // namespace

Result<Json> ParseStrictJson(std::string_view text, const JsonLimits& limits,
                             const TakeMemory& take_memory) {
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(
        Concat("expected at most ", limits.max_bytes, " bytes of JSON, found ", text.size()));
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    return absl::InvalidArgumentError("expected JSON, found a byte order mark");
  }
  // The library's parser would stop at a NUL byte.
  if (const size_t at = text.find('\0'); at != std::string_view::npos) {
    return absl::InvalidArgumentError(Concat("expected JSON, found a NUL byte at offset ", at));
  }
  Builder builder(limits, take_memory);
  try {
    if (!Json::sax_parse(text.begin(), text.end(), &builder, Json::input_format_t::json,
                         /*strict=*/true)) {
      if (builder.out_of_memory()) return absl::ResourceExhaustedError(builder.error());
      return absl::InvalidArgumentError(builder.error().empty() ? std::string("malformed JSON")
                                                                : builder.error());
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(Printable(error.what(), 240));
  }
  return std::move(builder.root());
}

void ClearJson(Json& value) noexcept {
  // The destructor moves the elements of a list or object to a list that it allocates. It allocates
  // nothing for elements that are empty.
  if (auto* list = value.get_ptr<Json::array_t*>()) {
    for (Json& item : *list) ClearJson(item);
    list->clear();
  } else if (auto* object = value.get_ptr<Json::object_t*>()) {
    for (auto& [key, item] : *object) ClearJson(item);
    object->clear();
  }
}

std::string ShowJson(const Json& value) {
  if (value.is_object()) return Concat("an object of ", value.size(), " keys");
  if (value.is_array()) {
    bool simple = value.size() <= 8;
    for (size_t i = 0; simple && i < value.size(); ++i) simple = !value[i].is_structured();
    if (!simple) return Concat("a list of ", value.size(), " values");
  }
  if (value.is_string()) return Quoted(value.get_ref<const std::string&>());
  constexpr size_t kMaxBytes = 80;
  const std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  return text.size() <= kMaxBytes ? text : Concat(text.substr(0, kMaxBytes), "...");
}

}  // namespace moeserve

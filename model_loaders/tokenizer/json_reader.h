// Reads values from the JSON of tokenizer files, which are untrusted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error_text.h"
#include "engine/text/tokenizer/models/vocabulary.h"
#include "engine/text/tokenizer/utf8.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// The largest known tokenizer file has about 35 MiB.
inline constexpr size_t kMaxTokenizerFileBytes = size_t{128} << 20;

// Returns the contents of a file; nullopt if the file does not exist. InvalidArgument if it cannot
// be read or has more than kMaxTokenizerFileBytes.
absl::StatusOr<std::optional<std::string>> ReadTokenizerFile(const std::filesystem::path& path);

// Returns the type and, if short, the value of `value` for an error message.
std::string DescribeJson(const nlohmann::json& value);

// Reads values and keeps the first error. After an error every read returns an empty value, so that
// a caller may continue and check status() at the end.
class JsonReader {
 public:
  using Json = nlohmann::json;

  explicit JsonReader(std::string_view file_name) : file_name_(file_name) {}

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

  void Fail(const std::string& where, const std::string& what) {
    if (ok()) {
      status_ = absl::InvalidArgumentError(file_name_ + ": " + (where.empty() ? "" : where + ": ") +
                                           what);
    }
  }
  void FailExpected(const std::string& where, const std::string& expected, const Json& found) {
    Fail(where, "expected " + expected + ", found " + DescribeJson(found));
  }

  // Parses a JSON text. Fails and returns null if the text is not JSON, is nested too deep, or
  // repeats a key in an object.
  Json Parse(std::string_view text);

  // The functions below read `object[key]`. `where` is the path of `object` in error messages.
  std::string Path(const std::string& where, std::string_view key) const {
    return where.empty() ? std::string(key) : where + "." + std::string(key);
  }

  void CheckKeys(const Json& object, const std::string& where,
                 std::initializer_list<std::string_view> known) {
    if (!object.is_object()) return FailExpected(where, "an object", object);
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        Fail(Path(where, key), "this key is not supported");
      }
    }
  }

  // Returns a JSON null if the key is absent.
  const Json& Get(const Json& object, std::string_view key) const {
    static const Json null;
    if (!object.is_object()) return null;
    const auto it = object.find(key);
    return it == object.end() ? null : *it;
  }

  bool Bool(const Json& object, const std::string& where, std::string_view key,
            std::optional<bool> if_absent = std::nullopt) {
    const Json& value = Get(object, key);
    if (value.is_boolean()) return value.get<bool>();
    if (value.is_null() && if_absent.has_value()) return *if_absent;
    FailExpected(Path(where, key), "true or false", value);
    return false;
  }

  std::string String(const Json& object, const std::string& where, std::string_view key) {
    const Json& value = Get(object, key);
    if (value.is_string()) return value.get<std::string>();
    FailExpected(Path(where, key), "a string", value);
    return "";
  }

  std::optional<std::string> OptionalString(const Json& object, const std::string& where,
                                            std::string_view key) {
    if (Get(object, key).is_null()) return std::nullopt;
    return String(object, where, key);
  }

  const Json& Array(const Json& object, const std::string& where, std::string_view key) {
    static const Json empty = Json::array();
    const Json& value = Get(object, key);
    if (value.is_array()) return value;
    FailExpected(Path(where, key), "an array", value);
    return empty;
  }

  // Returns an integer from `low` to `high` >= `low`.
  size_t Size(const Json& object, const std::string& where, std::string_view key, size_t low,
              size_t high) {
    const Json& value = Get(object, key);
    if (value.is_number_unsigned() && value.get<uint64_t>() >= low &&
        value.get<uint64_t>() <= high) {
      return value.get<size_t>();
    }
    FailExpected(Path(where, key), Concat("an integer from ", low, " to ", high), value);
    return low;
  }

  // Returns a string that is one character.
  std::string Character(const Json& object, const std::string& where, std::string_view key) {
    std::string text = String(object, where, key);
    size_t size = 0;
    if (ok() && !text.empty()) NextCodePoint(text, &size);
    if (ok() && (text.empty() || size != text.size())) {
      FailExpected(Path(where, key), "one character", Get(object, key));
    }
    return text;
  }

  TokenId Id(const Json& value, const std::string& where) {
    if (value.is_number_unsigned() && value.get<uint64_t>() <= Vocabulary::kMaxId) {
      return value.get<TokenId>();
    }
    FailExpected(where, Concat("an id from 0 to ", Vocabulary::kMaxId), value);
    return 0;
  }

 private:
  std::string file_name_;
  absl::Status status_;
};

}  // namespace moeserve

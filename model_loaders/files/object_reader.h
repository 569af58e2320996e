// Reads a JSON object key by key and reports keys that are missing, have a wrong type, or are
// unknown.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/error_text.h"
#include "base/kinds.h"
#include "base/strict_json.h"
#include "nlohmann/json.hpp"

namespace moeserve {

template <typename Enum>
struct Choice {
  std::string_view name;
  Enum value;
};

// Reads one object. Refuses integers that do not fit int, but does not check other ranges:
// Validate() checks them for every family.
//
// After an error, a function returns the default or zero, so that one run reports several errors.
// The caller must check `problems` before it uses the values.
class ObjectReader {
 public:
  // `path` is the name of the object in error messages, "" for the whole file. `json` and
  // `problems` must outlive the reader.
  ObjectReader(const nlohmann::json& json, std::string path, Problems* problems);

  // Each function returns the value of `key`, or `fallback` if the key is absent. A key without
  // `fallback` is required.
  int Int(std::string_view key, std::optional<int> fallback = std::nullopt);
  double Real(std::string_view key, std::optional<double> fallback = std::nullopt);
  bool Bool(std::string_view key, bool fallback);
  // Reads a required list of numbers.
  // At most 4,096 numbers.
  std::vector<double> Reals(std::string_view key);
  // Reads a required list of at most `most` integers.
  std::vector<int> Ints(std::string_view key, size_t most);
  // Reads a required list of texts.
  std::vector<std::string> Texts(std::string_view key);
  // Returns the value of the matching choice, or `fallback` if the key is absent. If no choice
  // matches, reports an error and returns nullopt.
  template <typename Enum>
  std::optional<Enum> Pick(std::string_view key, const std::vector<Choice<Enum>>& choices,
                           std::optional<Enum> fallback = std::nullopt);

  // Does the same as Pick() for an enum with a table of traits (base/kinds.h). The choices are the
  // names of the enum's values from `first` on.
  template <typename Kind>
  std::optional<Kind> PickKind(std::string_view key, Kind first = Kind{},
                               std::optional<Kind> fallback = std::nullopt);

  // Returns the JSON value, or null if the key is absent. Required() reports a missing key;
  // `expected` describes the value in that error message.
  const nlohmann::json* Optional(std::string_view key);
  const nlohmann::json* Required(std::string_view key, std::string_view expected);

  // Reports every key that was not read as unknown. `of` names the variant of the object in the
  // error message, such as " (kind is \"routed\")".
  void RefuseOthers(std::string_view of = "");

  // Returns the keys of the object that were not read, in alphabetical order.
  std::vector<std::string> Unread() const;

  // Returns whether the JSON value is an object.
  bool valid() const { return valid_; }
  std::string PathOf(std::string_view key) const;
  void Fault(std::string_view key, std::string_view expected, std::string_view found);

 private:
  const nlohmann::json& json_;
  const std::string path_;
  Problems* const problems_;
  bool valid_ = true;
  std::set<std::string, std::less<>> known_;
};

// Returns the integer if `json` is an integer that fits int, else nullopt.
std::optional<int> IntFrom(const nlohmann::json& json);

template <typename Enum>
std::optional<Enum> ObjectReader::Pick(std::string_view key,
                                       const std::vector<Choice<Enum>>& choices,
                                       std::optional<Enum> fallback) {
  std::string expected;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) expected.append(i + 1 == choices.size() ? " or " : ", ");
    expected.append(Quoted(choices[i].name));
  }
  const nlohmann::json* value = fallback.has_value() ? Optional(key) : Required(key, expected);
  if (value == nullptr) return fallback;
  if (value->is_string()) {
    for (const Choice<Enum>& choice : choices) {
      if (choice.name == value->get_ref<const std::string&>()) return choice.value;
    }
  }
  Fault(key, expected, ShowJson(*value));
  return std::nullopt;
}

template <typename Kind>
std::optional<Kind> ObjectReader::PickKind(std::string_view key, Kind first,
                                           std::optional<Kind> fallback) {
  std::vector<Choice<Kind>> choices;
  for (const Kind kind : AllKinds(first)) choices.push_back({KindName(kind), kind});
  return Pick<Kind>(key, choices, fallback);
}

}  // namespace moeserve

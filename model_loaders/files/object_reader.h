// Reads a JSON object key by key and reports what is missing, of the wrong type, or left over.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/kinds.h"
#include "base/message.h"
#include "model_loaders/files/strict_json.h"
#include "nlohmann/json.hpp"

namespace moeserve {

template <typename Enum>
struct Choice {
  std::string_view name;
  Enum value;
};

// Does not check ranges, which Validate() does for every loader; refuses only integers that do not
// fit int.
//
// After a fault, returns the default or zero, so that one run reports several faults. The caller
// checks `problems` before it uses the values.
class ObjectReader {
 public:
  // `path`: the name of the object in messages, "" for the whole file. `json` and `problems` must
  // outlive the reader.
  ObjectReader(const nlohmann::json& json, std::string path, Problems* problems);

  // A key without a fallback is required.
  int Int(std::string_view key, std::optional<int> fallback = std::nullopt);
  double Real(std::string_view key, std::optional<double> fallback = std::nullopt);
  bool Bool(std::string_view key, bool fallback);
  // The value of the matching choice, or the fallback if the key is absent. Reports a fault and
  // returns nothing if no choice matches.
  template <typename Enum>
  std::optional<Enum> Pick(std::string_view key, const std::vector<Choice<Enum>>& choices,
                           std::optional<Enum> fallback = std::nullopt);

  // Pick() for an enum with a table of traits (base/kinds.h): its names from `first` on.
  template <typename Kind>
  std::optional<Kind> PickKind(std::string_view key, Kind first = Kind{},
                               std::optional<Kind> fallback = std::nullopt);
  // Reads `key` as the name of any value of the enum. Returns `fallback` if the key is absent or
  // its value was reported as wrong.
  template <typename Kind>
  Kind PickKindOr(std::string_view key, Kind fallback) {
    return PickKind<Kind>(key, Kind{}, fallback).value_or(fallback);
  }

  // The JSON value, null if the key is absent. `expected` describes it in the message about a
  // missing key.
  const nlohmann::json* Optional(std::string_view key);
  const nlohmann::json* Required(std::string_view key, std::string_view expected);

  // Reports every key that was not read. `of` names the variant of the object:
  // " (kind is \"routed\")".
  void RefuseOthers(std::string_view of = "");

  // Whether the value is an object at all.
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

// The integer if `json` is one that fits int.
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

// Enums with one table of traits: a function Traits(Kind), a switch without `default` over all
// values, so that the compiler names it when a value is added. It returns a struct with at least a
// `name`, which is how files and reports spell the value, and {} for numbers that are no value.
// Values are numbered from 0 without gaps.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moeserve {

template <typename Kind>
constexpr std::string_view KindName(Kind kind) {
  return Traits(kind).name;
}

// All values from `first` on, in the order of the enum.
template <typename Kind>
std::vector<Kind> AllKinds(Kind first = Kind{}) {
  std::vector<Kind> kinds;
  for (int i = static_cast<int>(first); !Traits(static_cast<Kind>(i)).name.empty(); ++i) {
    kinds.push_back(static_cast<Kind>(i));
  }
  return kinds;
}

template <typename Kind>
std::vector<std::string> KindNames(Kind first = Kind{}) {
  std::vector<std::string> names;
  for (const Kind kind : AllKinds(first)) names.emplace_back(Traits(kind).name);
  return names;
}

// The value with this name, or nothing.
template <typename Kind>
std::optional<Kind> KindNamed(std::string_view name, Kind first = Kind{}) {
  for (const Kind kind : AllKinds(first)) {
    if (Traits(kind).name == name) return kind;
  }
  return std::nullopt;
}

}  // namespace moeserve

// Helpers for enums that have a table of traits. For such an enum, a function Traits(Kind) contains
// a switch over all values without `default`, so that the compiler reports the switch when a value
// is added to the enum, or calls NameIn() with the names of all values. Traits() returns a struct
// with at least a `name`, which is the value's spelling in files and reports. For a number that is
// not a value of the enum Traits() returns {}. Values are numbered from 0 without gaps.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moeserve {

// The traits of enums whose values have only names.
struct NameTraits {
  std::string_view name;  // in configuration files
};

// Returns the traits of `kind`. `names` has the names of all values, in the order of the enum.
template <typename Kind>
constexpr NameTraits NameIn(std::initializer_list<std::string_view> names, Kind kind) {
  const auto i = static_cast<size_t>(kind);
  return {i < names.size() ? names.begin()[i] : std::string_view()};
}

template <typename Kind>
constexpr std::string_view KindName(Kind kind) {
  return Traits(kind).name;
}

// Returns all values from `first` on, in the order of the enum.
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

// Returns the value with this name, or nothing if no value has it.
template <typename Kind>
std::optional<Kind> KindNamed(std::string_view name, Kind first = Kind{}) {
  for (const Kind kind : AllKinds(first)) {
    if (Traits(kind).name == name) return kind;
  }
  return std::nullopt;
}

}  // namespace moeserve

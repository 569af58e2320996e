// Case mappings of Unicode, as Python's str has them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace moeserve::chat {

// Every `step`-th code point from `first` to `last` maps to itself plus `delta`.
struct CaseRange {
  char32_t first;
  char32_t last;
  uint32_t step;
  int32_t delta;
};
std::span<const CaseRange> UpperRanges();
std::span<const CaseRange> LowerRanges();

// Code points with a mapping of several characters or a title case that is not the upper case.
struct SpecialCase {
  char32_t code_point;
  std::string_view upper;
  std::string_view lower;
  std::string_view title;
};
std::span<const SpecialCase> SpecialCases();

struct PointRange {
  char32_t first;
  char32_t last;
};
std::span<const PointRange> CasedRanges();
bool InRanges(std::span<const PointRange> ranges, char32_t code_point);
bool IsCaseIgnorable(char32_t code_point);
// What repr() shows as it is, above ASCII.
bool IsPrintable(char32_t code_point);

}  // namespace moeserve::chat

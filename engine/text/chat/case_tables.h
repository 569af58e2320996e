// Case mappings of Unicode, as in Python's str.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace moeserve::chat {

// Every `step`-th code point from `first` to `last` maps to the code point plus `delta`.
struct CaseRange {
  char32_t first;
  char32_t last;
  uint32_t step;
  int32_t delta;
};
std::span<const CaseRange> UpperRanges();
std::span<const CaseRange> LowerRanges();
// Of code points whose title case differs from their upper case.
std::span<const CaseRange> TitleRanges();

// A code point that maps to several characters.
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
// Returns whether Python's repr() leaves a code point above ASCII unescaped.
bool IsPrintable(char32_t code_point);

}  // namespace moeserve::chat

// Unicode data that PCRE2 lacks or has in the wrong version: Hugging Face's patterns use Unicode
// 16, its normalization uses an older version.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace moeserve {

struct CodePointRange {
  char32_t first;
  char32_t last;
};

// Code points whose general category differs between Unicode 14 and Unicode 16, with the category
// of Unicode 16; ascending.
struct NewerRange {
  char32_t first;
  char32_t last;
  char category[3];
};
std::span<const NewerRange> NewerRanges();

// Returns the members of a script, given by its name in lower case; empty for a script without a
// table.
std::span<const CodePointRange> ScriptRanges(std::string_view script);

// A range of code points whose canonical combining class is not 0; ranges are ascending.
struct CombiningClassRange {
  char32_t first;
  char32_t last;
  uint8_t value;
};
std::span<const CombiningClassRange> CombiningClassRanges();

// One step of canonical decomposition, without Hangul; ascending. `second` is 0 if the result is a
// single character. `composes`: normalization form C composes the pair again.
struct Decomposition {
  char32_t code_point;
  char32_t first;
  char32_t second;
  bool composes;
};
std::span<const Decomposition> Decompositions();

}  // namespace moeserve

// Unicode data that PCRE2 does not have, or that must be of one version: Hugging Face's patterns
// use Unicode 16, its normalisation an older one.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace moeserve {

struct CodePointRange {
  char32_t first;
  char32_t last;
};

// Code points whose general category in Unicode 16 is not that of Unicode 14; ascending.
struct NewerRange {
  char32_t first;
  char32_t last;
  char category[3];
};
std::span<const NewerRange> NewerRanges();

// Members of a script, by its name in lower case; empty for a script without a table.
std::span<const CodePointRange> ScriptRanges(std::string_view script);

// Canonical combining classes other than 0; ascending.
struct CombiningClassRange {
  char32_t first;
  char32_t last;
  uint8_t value;
};
std::span<const CombiningClassRange> CombiningClassRanges();

// One step of canonical decomposition, without Hangul; ascending. `second` is 0 if the result is a
// single character. `composes`: normal form C composes the pair again.
struct Decomposition {
  char32_t code_point;
  char32_t first;
  char32_t second;
  bool composes;
};
std::span<const Decomposition> Decompositions();

}  // namespace moeserve

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

// Decompositions, ascending and without Hangul. The text is that of all code points of all ranges
// in order, each with the range's `size`.
struct DecompositionRange {
  char32_t first;
  char32_t last;
  uint8_t size;
};
struct Decompositions {
  std::span<const DecompositionRange> ranges;
  std::span<const char32_t> text;
};
// One step of canonical decomposition, to one or two characters.
Decompositions CanonicalDecompositions();

// Code points whose decomposition to two characters normalization form C does not compose again.
std::span<const CodePointRange> CompositionExclusions();

}  // namespace moeserve

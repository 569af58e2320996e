// What Hugging Face's library does with single characters. Its crates use several versions of
// Unicode, so that these tables agree with no single version.
#pragma once

#include <cstdint>
#include <span>

#include "engine/text/tokenizer/unicode/unicode_tables.h"

namespace moeserve {

// The full compatibility decompositions of code points whose canonical decomposition differs.
Decompositions CompatibilityDecompositions();

// Every `step`-th code point from `first` to `last` has the lower-case form code point + delta;
// ascending. U+0130 is absent; its form has two characters.
struct LowerCase {
  char32_t first;
  char32_t last;
  int32_t step;
  int32_t delta;
};
std::span<const LowerCase> LowerCaseRanges();

// What the normalizer StripAccents removes.
std::span<const CodePointRange> CombiningMarkRanges();
// What BertNormalizer removes with `strip_accents`, after decomposition.
std::span<const CodePointRange> NonspacingMarkRanges();
// What BertNormalizer removes with `clean_text`.
std::span<const CodePointRange> OtherRanges();
std::span<const CodePointRange> PunctuationRanges();

// Classes for finding grapheme clusters (Unicode Standard Annex 29). Classes that are defined by
// few ranges, such as Hangul syllables, have no entries, and neither have control characters above
// U+FFFF, because they do not affect the results.
enum class GraphemeClass : uint8_t {
  kOther,
  kControl,
  kExtend,            // also InCB=Extend
  kExtendNoConjunct,  // without InCB=Extend
  kLinker,            // InCB=Linker, also Extend
  kSpacingMark,
  kPrepend,
  kPictographic,
  kConsonant,  // InCB=Consonant
};
struct GraphemeMembers {
  GraphemeClass value;
  std::span<const CodePointRange> ranges;
};
// The members of all classes but kOther.
std::span<const GraphemeMembers> GraphemeClasses();

}  // namespace moeserve

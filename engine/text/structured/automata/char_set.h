// Sets of Unicode code points and the byte sequences that spell their members.
#pragma once

#include <cstdint>
#include <vector>

namespace moeserve::structured {

struct CodePointRange {
  char32_t first;
  char32_t last;
  bool operator==(const CodePointRange&) const = default;
  auto operator<=>(const CodePointRange&) const = default;
};

// Ranges in ascending order that neither overlap nor touch; no surrogates.
using CharSet = std::vector<CodePointRange>;

CharSet AllCharacters();
// Sorts, joins, and takes out surrogates.
CharSet Normalized(CharSet set);
CharSet Complement(const CharSet& set);
// With the other case of ASCII letters.
CharSet WithBothCases(const CharSet& set);

// How the characters of a text appear as bytes.
enum class Encoding {
  kUtf8,
  // Inside a JSON string, as common writers spell it: a quote, a backslash or a control character
  // by its short escape, or \u00xx (lower case) where there is none; everything from DEL on as
  // itself or as \uxxxx, a pair of surrogates where needed; the rest as itself only.
  kJsonString,
};

// Whether `code_unit` may be spelt \uxxxx inside a JSON string; surrogates included.
bool MayBeHexEscaped(uint32_t code_unit);
// The character after the backslash that stands for `c`, 0 if there is none.
char ShortEscape(char32_t c);

// An automaton without loops for one character of a set: state 0 is the start.
struct CharAutomaton {
  static constexpr int32_t kDone = -1;
  struct Edge {
    uint8_t first;
    uint8_t last;
    int32_t target;
  };
  std::vector<std::vector<Edge>> states;
};

CharAutomaton BuildCharAutomaton(const CharSet& set, Encoding encoding);

}  // namespace moeserve::structured

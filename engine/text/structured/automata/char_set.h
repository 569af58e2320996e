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
// Sorts and joins the ranges and removes surrogates.
CharSet Normalized(CharSet set);
CharSet Complement(const CharSet& set);
// Adds the other case of ASCII letters.
CharSet WithBothCases(const CharSet& set);

// Encoding of the characters of a text as bytes.
enum class Encoding {
  kUtf8,
  // Inside a JSON string, as common writers spell it. A quote, a backslash or a control character:
  // its short escape, or \u00xx (lower case) if it has none. From DEL on: unescaped, or \uxxxx,
  // with a pair of surrogates if needed. All others: unescaped.
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

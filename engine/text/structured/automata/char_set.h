// Sets of Unicode code points, and automata for the byte sequences that spell their members.
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
// Sorts and joins overlapping or adjacent ranges and removes surrogates.
CharSet Normalized(CharSet set);
CharSet Complement(const CharSet& set);
// Adds the other case of each ASCII letter in `set`.
CharSet WithBothCases(const CharSet& set);

// How the characters of a text are encoded as bytes.
enum class Encoding {
  kUtf8,
  // As inside a JSON string, in the spellings that common JSON writers use. A quote, a backslash or
  // a control character is spelt by its short escape, or by \u00xx (lower case) if it has none. A
  // character from DEL on is unescaped or spelt by \uxxxx, with a surrogate pair if needed. All
  // other characters are unescaped.
  kJsonString,
};

// Returns whether `code_unit`, which may be a surrogate, may be spelt \uxxxx inside a JSON string.
bool MayBeHexEscaped(uint32_t code_unit);
// Returns the character that spells `c` after a backslash; 0 if there is none.
char ShortEscape(char32_t c);

// An automaton without loops that accepts one character of a set; state 0 is the start.
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

// Regular expressions: the regular part of ECMA-262's syntax with Unicode characters.
//
// Supported: literals, escapes, classes, groups (capturing or not), alternation, greedy and lazy
// repetition, ^ and $ (the ends of the text, anywhere in the pattern), (?i) at the start of the
// pattern (ASCII letters). Back-references, look-around and word boundaries are refused by name.
#pragma once

#include <string_view>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/char_set.h"

namespace moeserve::structured {

enum class MatchMode {
  kWholeText,
  kSearch,  // anywhere in the text
};

// Accepts the texts that `pattern` matches, in `encoding` (without quotes). Not finished.
// InvalidArgument: what is wrong, with its position in the pattern.
Result<ByteDfa> PatternDfa(std::string_view pattern, MatchMode mode, Encoding encoding,
                           CompileBudget* budget);

}  // namespace moeserve::structured

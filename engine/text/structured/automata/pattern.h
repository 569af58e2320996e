// Regular expressions with the regular part of ECMA-262's syntax, over Unicode characters.
//
// Supported: literals, escapes, classes, groups (capturing or not), alternation, greedy and lazy
// repetition, ^ and $ (the ends of the text, anywhere in the pattern), (?i) at the start of the
// pattern (ASCII letters). Back-references, look-around and word boundaries are rejected with an
// error that names them.
#pragma once

#include <string_view>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/char_set.h"
#include "engine/text/structured/automata/pattern_syntax.h"

namespace moeserve::structured {

enum class MatchMode {
  kWholeText,
  kSearch,  // anywhere in the text
};

// Returns an automaton for the texts that `pattern` matches, encoded in `encoding` (without
// quotes). ByteDfa::Finish() is still to be called on it. If the pattern is invalid, returns
// InvalidArgument with the cause and its position in the pattern.
Result<ByteDfa> PatternDfa(std::string_view pattern, MatchMode mode, Encoding encoding,
                           CompileBudget* budget);

// Returns an automaton for the texts that the whole of `tree` matches. As for PatternDfa().
Result<ByteDfa> TreeDfa(const PatternNode& tree, Encoding encoding, CompileBudget* budget);

}  // namespace moeserve::structured

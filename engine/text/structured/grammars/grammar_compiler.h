// Compiles context-free grammars.
#pragma once

#include <string_view>

#include "engine/text/structured/constraint.h"
#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// Returns the grammar after Grammar::Finish(). `any_string` is the finished automaton of all JSON
// strings. Rules that begin with themselves are supported; rules that begin with each other in a
// circle are refused. InvalidArgument names what is wrong or unsupported.
Result<Grammar> CompileGrammarText(std::string_view text, const ConstraintLimits& limits,
                                   DfaPtr any_string, const ByteSet& spellable,
                                   CompileBudget* budget);

}  // namespace moeserve::structured

// Compiles formats to grammars.
#pragma once

#include "engine/text/structured/constraint.h"
#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// Returns the grammar after Grammar::Finish(). `any_string` is the finished automaton of all JSON
// strings. InvalidArgument, with the place in the format, names what is wrong or unsupported.
Result<Grammar> CompileFormat(const TextFormat& format, const ConstraintLimits& limits,
                              DfaPtr any_string, const ByteSet& spellable, CompileBudget* budget);

}  // namespace moeserve::structured

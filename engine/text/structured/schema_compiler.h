// JSON schemas as grammars.
#pragma once

#include <string_view>

#include "engine/text/structured/constraint.h"
#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// Returns the finished grammar. `any_string`: the finished automaton of all JSON strings.
// InvalidArgument: what is wrong or unsupported, with a JSON pointer.
Result<Grammar> CompileSchema(std::string_view schema, bool strict, const ConstraintLimits& limits,
                              DfaPtr any_string, const ByteSet& spellable, CompileBudget* budget);

}  // namespace moeserve::structured

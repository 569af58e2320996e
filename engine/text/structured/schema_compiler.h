// JSON schemas as grammars.
#pragma once

#include <string_view>

#include "engine/text/structured/constraint.h"
#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// The grammar, finished. `any_string`: the finished automaton of all JSON strings. InvalidArgument:
// what is wrong or unsupported and where.
Result<Grammar> CompileSchema(std::string_view schema, bool strict, const ConstraintLimits& limits,
                              DfaPtr any_string, const ByteSet& spellable, CompileBudget* budget);

}  // namespace moeserve::structured

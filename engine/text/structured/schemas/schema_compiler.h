// Compiles JSON schemas to grammars.
#pragma once

#include <string_view>

#include "engine/text/structured/constraint.h"
#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

struct SchemaOptions {
  bool strict = false;          // ConstraintSpec::strict
  bool closed_objects = false;  // ConstraintSpec::closed_objects
};

// Returns the grammar after Grammar::Finish(). `any_string` is the finished automaton of all JSON
// strings. InvalidArgument, with a JSON pointer, names what is wrong or unsupported.
Result<Grammar> CompileSchema(std::string_view schema, const SchemaOptions& options,
                              const ConstraintLimits& limits, DfaPtr any_string,
                              const ByteSet& spellable, CompileBudget* budget);

}  // namespace moeserve::structured

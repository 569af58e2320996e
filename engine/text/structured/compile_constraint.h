// Compiles every kind of constraint.
#pragma once

#include <memory>

#include "engine/text/structured/constraint.h"

namespace moeserve {

// Compiles a constraint. Returns InvalidArgument, with a JSON pointer into the schema or a position
// in the pattern, if `spec` is invalid, uses an unsupported feature, exceeds a limit, matches no
// text, matches only texts that the vocabulary cannot spell, or if its first mask takes too much
// work (ConstraintState::overworked()). A keyword that restricts values and
// is not supported is always an error, so the response never violates the constraint.
Result<std::shared_ptr<const CompiledConstraint>> CompileConstraint(
    const ConstraintSpec& spec, std::shared_ptr<const VocabularyIndex> vocabulary,
    const ConstraintLimits& limits = {});

}  // namespace moeserve

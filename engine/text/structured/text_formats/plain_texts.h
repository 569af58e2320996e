// Automata for the constraints that are regular expressions or lists of texts.
#pragma once

#include <string>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/constraint.h"

namespace moeserve::structured {

// ByteDfa::Finish() is still to be called on the automata.
Result<ByteDfa> RegexDfa(const std::string& pattern, const ConstraintLimits& limits,
                         CompileBudget* budget);
Result<ByteDfa> ChoiceDfa(const std::vector<std::string>& choices, const ConstraintLimits& limits,
                          CompileBudget* budget);

}  // namespace moeserve::structured

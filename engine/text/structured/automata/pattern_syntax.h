// The syntax tree of a regular expression.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/structured/automata/char_set.h"

namespace moeserve::structured {

struct PatternNode {
  enum class Kind { kSet, kSequence, kAlternatives, kRepeat, kAtStart, kAtEnd };
  static constexpr int kUnbounded = -1;

  Kind kind = Kind::kSequence;
  CharSet set;                                         // kSet
  std::vector<std::unique_ptr<PatternNode>> children;  // kRepeat has exactly one child
  int min = 0;                                         // kRepeat: smallest count
  int max = kUnbounded;                                // kRepeat: largest count
};

// Returns InvalidArgument with the cause and its position in the pattern, counted in characters
// from 1, if the pattern is invalid.
Result<std::unique_ptr<PatternNode>> ParsePattern(std::string_view pattern);

}  // namespace moeserve::structured

// The distances and heights of the nodes of a grammar.
#pragma once

#include <algorithm>

#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// Largest number of unnamed properties that an object may need to reach minProperties.
inline constexpr int64_t kMaxFillers = 1000;

// Arithmetic in which every number from kUnreachable on is kUnreachable.
inline int64_t AddDistances(int64_t a, int64_t b) { return std::min(a + b, kUnreachable); }
inline int64_t MultiplyDistance(int64_t a, int64_t b) {
  if (a == 0 || b == 0) return 0;
  return a > kUnreachable / b ? kUnreachable : std::min(a * b, kUnreachable);
}

// Sets Node::distance and Node::height of all nodes, and those of the states of rules, and
// Property::suffix_bytes. Grammar::spellable must be set.
Status MeasureGrammar(Grammar* grammar, CompileBudget* budget);

}  // namespace moeserve::structured

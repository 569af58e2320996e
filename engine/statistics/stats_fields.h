// Walks the counters of two statistics side by side: adding, subtracting and clearing are one list
// of fields.
#pragma once

#include <cstddef>
#include <utility>

#include "base/check.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve {

// Calls f(counter of `a`, counter of `b`) for every counter of one block.
template <typename A, typename B, typename F>
void ForEachCounter(A& a, B& b, const F& f) {
  const auto each = [&](auto& x, auto& y) {
    MOESERVE_CHECK(x.size() == y.size(), "statistics of the same model");
    for (size_t i = 0; i < x.size(); ++i) f(x[i], y[i]);
  };
  for (int p = 0; p < kNumPhases; ++p) {
    f(a.tokens[p], b.tokens[p]);
    f(a.rows[p], b.rows[p]);
  }
  each(a.selections, b.selections);
  each(a.decode_selections, b.decode_selections);
  each(a.weight_sums, b.weight_sums);
  each(a.touching_tokens, b.touching_tokens);
  each(a.visits, b.visits);
  each(a.distinct_histogram, b.distinct_histogram);
  f(a.nonfinite_rows, b.nonfinite_rows);
  f(a.recomputed_tokens, b.recomputed_tokens);
  f(a.recomputed_rows, b.recomputed_rows);
  each(a.recomputed_selections, b.recomputed_selections);
}

template <typename A, typename B, typename F>
void ForEachRouterCounter(A& a, B& b, const F& f) {
  f(a.rows, b.rows);
  f(a.entropy_sum, b.entropy_sum);
  f(a.squared_logsumexp_sum, b.squared_logsumexp_sum);
  for (size_t e = 0; e < a.probability_sums.size(); ++e) {
    f(a.probability_sums[e], b.probability_sums[e]);
    f(a.selections[e], b.selections[e]);
  }
}

// The counters of the model as a whole, blocks excluded.
template <typename A, typename B, typename F>
void ForEachModelCounter(A& a, B& b, const F& f) {
  f(a.tokens, b.tokens);
  f(a.recomputed_tokens, b.recomputed_tokens);
  f(a.steps, b.steps);
  for (size_t n = 0; n < a.diversity_histogram.size(); ++n) {
    f(a.diversity_histogram[n], b.diversity_histogram[n]);
  }
  const auto histogram = [&](auto& x, auto& y) {
    for (size_t i = 0; i < x.buckets.size(); ++i) f(x.buckets[i], y.buckets[i]);
    f(x.sum, y.sum);
  };
  for (int p = 0; p < kNumPhases; ++p) {
    histogram(a.expert_rows[p], b.expert_rows[p]);
    histogram(a.active_experts[p], b.active_experts[p]);
  }
}

template <typename A, typename B, typename F>
void ForEachCounterOfModel(A& a, B& b, const F& f) {
  MOESERVE_CHECK(a.blocks.size() == b.blocks.size() &&
                     a.diversity_histogram.size() == b.diversity_histogram.size(),
                 "statistics of the same model");
  ForEachModelCounter(a, b, f);
  for (size_t i = 0; i < a.blocks.size(); ++i) {
    ForEachCounter(a.blocks[i], b.blocks[i], f);
    ForEachRouterCounter(a.blocks[i].router, b.blocks[i].router, f);
  }
}

}  // namespace moeserve

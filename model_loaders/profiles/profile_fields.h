// The counters of expert statistics and their names in profile files; see
// engine/statistics/README.md. A new field of the statistics must be added here.
#pragma once

#include <cstdint>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// f(name, vector, by_expert) for each array of a block; by_expert: it has E entries.
template <typename F>
void ForEachBlockArray(BlockExpertStats& b, const F& f) {
  f("selections", b.selections, true);
  f("decode_selections", b.decode_selections, true);
  f("weight_sums", b.weight_sums, true);
  f("touching_tokens", b.touching_tokens, true);
  f("visits", b.visits, true);
  f("distinct_histogram", b.distinct_histogram, false);
  f("recomputed_selections", b.recomputed_selections, true);
  f("router.probability_sums", b.router.probability_sums, true);
  f("router.selections", b.router.selections, true);
  f("expert_parameters", b.expert_parameters, true);
  f("expert_widths", b.expert_widths, true);
}

// f(counter) for each of blocks.<i>.counters, in the order of the file.
inline constexpr int kBlockScalars = 8;
template <typename F>
void ForEachBlockScalar(BlockExpertStats& b, const F& f) {
  for (uint64_t& n : b.tokens) f(n);
  for (uint64_t& n : b.rows) f(n);
  f(b.nonfinite_rows);
  f(b.recomputed_tokens);
  f(b.recomputed_rows);
  f(b.router.rows);
}

// f(counter) for each of model.counters: tokens, recomputed tokens, steps, then for each phase the
// buckets and the sum of expert_rows, then for each phase those of active_experts.
inline constexpr int kModelScalars = 3 + kNumPhases * (16 + 12);
template <typename F>
void ForEachModelScalar(ExpertStats& s, const F& f) {
  f(s.tokens);
  f(s.recomputed_tokens);
  f(s.steps);
  for (int p = 0; p < kNumPhases; ++p) {
    for (uint64_t& n : s.expert_rows[p].buckets) f(n);
    f(s.expert_rows[p].sum);
  }
  for (int p = 0; p < kNumPhases; ++p) {
    for (uint64_t& n : s.active_experts[p].buckets) f(n);
    f(s.active_experts[p].sum);
  }
}

}  // namespace moeserve

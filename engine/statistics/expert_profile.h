// What a model's experts did with some texts: the counters, and what statistics need beside them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/hidden_samples.h"
#include "engine/statistics/measures/route_sequence.h"
#include "engine/statistics/measures/token_affinity.h"
#include "engine/statistics/token_expert_counts.h"

namespace moeserve {

// Plain data. All vectors by routed block are in the order of stats.blocks.
struct ExpertProfile {
  std::string model;  // a name for people
  int64_t vocabulary = 0;
  ExpertStats stats;
  // By routed block [vocabulary * E], tokens outermost; empty where none were kept.
  std::vector<std::vector<uint32_t>> token_counts;
  std::vector<HiddenSample> hidden;  // by routed block; empty where none were kept
  std::optional<RouteSequence> routes;

  // `token_counts` must be there.
  TokenCounts CountsOf(size_t block) const {
    return {vocabulary, stats.blocks[block].num_experts, token_counts[block]};
  }
};

// One table for each routed block of `stats`, whose experts are the columns of `table`.
std::vector<std::vector<uint32_t>> CountsByBlock(const TokenExpertCounts& table,
                                                 const ExpertStats& stats);

// OK where `a` and `b` have the same routed blocks with as many experts, of whatever size, so that
// their loads can be compared. InvalidArgument: what differs.
absl::Status CheckComparable(const ExpertProfile& a, const ExpertProfile& b);

// OK where vocabulary and sizes of the experts are the same as well, so that counters can be added.
absl::Status CheckSameShape(const ExpertProfile& a, const ExpertProfile& b);

// Adds what happened in `from`, as if the texts of `to` and then those of `from` had been run. What
// only one of the two kept (token counts, hidden sample, routes) is dropped. Counters and
// histograms are exact, token counts stop at their maximum, sums of floats are rounded. Hidden
// samples stay fair: each row of either text is in the merged sample with the same chance, where
// it does not fit as a whole. InvalidArgument: not CheckSameShape().
absl::Status Merge(ExpertProfile& to, const ExpertProfile& from);

}  // namespace moeserve

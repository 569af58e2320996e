// What the experts of a model did over some texts: counters, token counts, sampled rows and routes.
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

// Plain data. All vectors with one entry per routed block are in the order of stats.blocks.
struct ExpertProfile {
  std::string model;  // a name for people to read
  int64_t vocabulary = 0;
  ExpertStats stats;
  // One table [vocabulary][E] per routed block; empty if token counts were not kept.
  std::vector<std::vector<uint32_t>> token_counts;
  std::vector<HiddenSample> hidden;  // by routed block; empty if not kept
  std::optional<RouteSequence> routes;

  // Requires token_counts.
  TokenCounts CountsOf(size_t block) const {
    return {.rows = vocabulary,
            .experts = stats.blocks[block].num_experts,
            .counts = token_counts[block]};
  }
};

// Splits `table` into one table per routed block of `stats`.
std::vector<std::vector<uint32_t>> CountsByBlock(const TokenExpertCounts& table,
                                                 const ExpertStats& stats);

// Returns OK if `a` and `b` have the same routed blocks with equal numbers of experts, so that
// their loads can be compared; otherwise InvalidArgument with the difference.
absl::Status CheckComparable(const ExpertProfile& a, const ExpertProfile& b);

// Returns OK if CheckComparable() does and the vocabulary and the experts' sizes are equal as well,
// so that counters can be added.
absl::Status CheckSameShape(const ExpertProfile& a, const ExpertProfile& b);

// Adds `from` to `to`, as if the texts of `to` and then those of `from` had been processed. Token
// counts, hidden samples and routes that only one of the two profiles has are dropped. Counters and
// histograms are exact, token counts saturate, sums of floats are rounded. Merged hidden samples
// are uniform over the rows of both texts. InvalidArgument if CheckSameShape() fails.
absl::Status Merge(ExpertProfile& to, const ExpertProfile& from);

}  // namespace moeserve

// Parameters that tokens activated, and how many experts a token met.
#pragma once

#include <cstdint>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// Means over tokens; 0 without tokens. `compute` counts an expert for every row that ran it (where
// a token's sub-tokens share one it counts repeatedly), `unique` once for a token.
struct ActivatedParameters {
  double compute = 0.0;
  double unique = 0.0;
  int64_t total = 0;  // that there are

  // Of `total`; 0 where there are none. HMoE, table 2, is the mean of the blocks' compute_ratio().
  double compute_ratio() const { return Ratio(compute); }
  double unique_ratio() const { return Ratio(unique); }

 private:
  double Ratio(double part) const { return total > 0 ? part / static_cast<double>(total) : 0.0; }
};

// Of a block's routed experts.
ActivatedParameters ActivatedOf(const BlockExpertStats& block);

// Of all routed blocks and of what every token uses; embeddings and head excluded.
ActivatedParameters ActivatedOf(const ExpertStats& stats);

// Mean over the routed blocks of compute_ratio(); 0 where there are none.
double MeanActivatedRatio(const ExpertStats& stats);

// Sub-token assign diversity (MH-MoE, fig. 7): distinct experts of a token in a block, mean over
// the diversity blocks and tokens. 0 without tokens.
double MeanDiversity(const ExpertStats& stats);

// Mean number of distinct experts that a token touched in a block; 0 without tokens.
double MeanDistinctExperts(const BlockExpertStats& block);

}  // namespace moeserve

// Parameters that tokens activated, and how many distinct experts a token used.
#pragma once

#include <cstdint>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// Means over tokens; 0 without tokens. `compute` counts an expert once for every row that used it,
// so several times if sub-tokens of a token share the expert. `unique` counts an expert once per
// token.
struct ActivatedParameters {
  double compute = 0.0;
  double unique = 0.0;
  int64_t total = 0;  // number of all parameters, activated or not

  // Return the activated share of `total`; 0 if `total` is 0. The ratio in HMoE, table 2, is the
  // mean of compute_ratio() over the blocks.
  double compute_ratio() const { return Ratio(compute); }
  double unique_ratio() const { return Ratio(unique); }

 private:
  double Ratio(double part) const { return total > 0 ? part / static_cast<double>(total) : 0.0; }
};

// Returns the activated parameters of a block's routed experts.
ActivatedParameters ActivatedOf(const BlockExpertStats& block);

// Returns the activated parameters of all routed blocks plus those that every token uses;
// embeddings and LM head are excluded.
ActivatedParameters ActivatedOf(const ExpertStats& stats);

// Returns the mean of compute_ratio() over the routed blocks; 0 if there are none.
double MeanActivatedRatio(const ExpertStats& stats);

// Returns the sub-token assign diversity (MH-MoE, fig. 7): the number of distinct experts of a
// token in a block, as a mean over the diversity blocks and tokens. 0 without tokens.
double MeanDiversity(const ExpertStats& stats);

// Returns the mean number of distinct experts that a token chose in a block; 0 without tokens.
double MeanDistinctExperts(const BlockExpertStats& block);

}  // namespace moeserve

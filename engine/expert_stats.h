// What the experts did, counted since start. Definitions: one count is one (row, chosen expert)
// pair that was really computed; a row is a token, or a sub-token where the block splits.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/model/spec.h"

namespace moeserve {

enum class Phase : uint8_t { kPrefill, kDecode };
inline constexpr int kNumPhases = 2;

// Counters of one routed block. Invariants: rows = split_heads * tokens (per phase); with top_k the
// sum over `selections` is k * rows; with top_p it lies between rows and max * rows. (Rows whose
// router scores were not finite select nothing and are counted in nonfinite_rows.)
struct BlockExpertStats {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  int num_experts = 0;
  int split_heads = 1;
  SelectKind select = SelectKind::kTopK;
  int max_selected = 1;
  uint64_t tokens[kNumPhases] = {0, 0};
  uint64_t rows[kNumPhases] = {0, 0};
  std::vector<uint64_t> selections;          // [E]
  std::vector<double> weight_sums;           // [E] sums of the final gate weights
  std::vector<uint64_t> visits;              // [E] steps in which a row chose the expert
  std::vector<uint64_t> distinct_histogram;  // [n] tokens that touched n distinct experts, n from 0
  uint64_t nonfinite_rows = 0;
  std::vector<int64_t> expert_parameters;  // [E] parameters of one expert

  uint64_t total_tokens() const { return tokens[0] + tokens[1]; }
  uint64_t total_rows() const { return rows[0] + rows[1]; }
};

struct ExpertStats {
  uint64_t tokens = 0;                   // tokens run through the model
  uint64_t steps = 0;                    // in which they were
  std::vector<BlockExpertStats> blocks;  // in order of layer, attention before feed_forward
  // Parameters that every token uses, embeddings, head and experts excluded (attention, norms,
  // routers, split and merge, shared experts, dense feed-forward).
  int64_t always_active_parameters = 0;
};

// Mean parameters that a token activated, embeddings and head excluded; every (row, expert) pair
// that ran counts. 0 where no token was run.
double MeanActivatedParameters(const ExpertStats& stats);

// Share of routed experts with selections / tokens > threshold, over all blocks (MH-MoE, fig. 1).
double ActivationRatio(const ExpertStats& stats, double threshold);

}  // namespace moeserve

// What the experts did, counted since start. Definitions: one count is one (row, chosen expert)
// pair that was really computed; a row is a token, or a sub-token where the block splits.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/model/phase.h"
#include "engine/spec/spec.h"
#include "kernels/route_counters.h"

namespace moeserve {

// Sums over the rows whose router scores were looked at (some of every so many steps, see
// RecorderOptions::router_stats_interval), but for rows counted in nonfinite_rows. p is the softmax
// of a row's scores over all experts, or its sigmoids divided by their sum where the gate is a
// sigmoid.
struct RouterStats {
  uint64_t rows = 0;
  double entropy_sum = 0.0;              // of -sum_e p_e ln p_e
  double squared_logsumexp_sum = 0.0;    // of (ln sum_e exp s_e)^2: the z-loss
  std::vector<double> probability_sums;  // [E] of p_e
  std::vector<uint64_t> selections;      // [E] over the same rows
};

// Counters of one routed block. Invariants: rows = split_heads * tokens (per phase); with top_k the
// sum over `selections` is k * rows; with top_p it lies between rows and max * rows. (Rows whose
// router scores had no finite maximum count too, with weights of 0; requests that override the
// selection obey their own k.) All but the recomputed_ fields and `visits` leave recomputed tokens
// out.
struct BlockExpertStats {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  int num_experts = 0;
  int split_heads = 1;
  SelectKind select = SelectKind::kTopK;
  int max_selected = 1;
  uint64_t tokens[kNumPhases] = {0, 0};
  uint64_t rows[kNumPhases] = {0, 0};
  std::vector<uint64_t> selections;          // [E] of both phases
  std::vector<uint64_t> decode_selections;   // [E] of them, in kDecode
  std::vector<double> weight_sums;           // [E] sums of the final gate weights
  std::vector<uint64_t> touching_tokens;     // [E] tokens of which some row chose the expert
  std::vector<uint64_t> visits;              // [E] steps in which a row chose the expert
  std::vector<uint64_t> distinct_histogram;  // [n] tokens that touched n distinct experts, n from 0
  uint64_t nonfinite_rows = 0;  // whose router scores held a NaN or had no finite maximum
  uint64_t recomputed_tokens = 0;
  uint64_t recomputed_rows = 0;
  std::vector<uint64_t> recomputed_selections;  // [E]
  RouterStats router;
  std::vector<int64_t> expert_parameters;  // [E] parameters of one expert
  std::vector<int> expert_widths;  // [E] hidden width; of attention experts: of all their heads

  uint64_t total_tokens() const { return tokens[0] + tokens[1]; }
  uint64_t total_rows() const { return rows[0] + rows[1]; }
};

struct ExpertStats {
  uint64_t tokens = 0;                   // tokens run through the model
  uint64_t recomputed_tokens = 0;        // not in `tokens`
  uint64_t steps = 0;                    // in which they were
  std::vector<BlockExpertStats> blocks;  // in order of layer, attention before feed_forward
  // [n] tokens that touched n distinct experts in all diversity blocks together: those that split,
  // or every routed block where none splits. Divided by their number it is the sub-token assign
  // diversity of MH-MoE, fig. 7.
  std::vector<uint64_t> diversity_histogram;
  int diversity_blocks = 0;
  // Of every step and routed block, recomputed rows included, by what the step held: index 1 where
  // all its rows were of kDecode, else 0. Rows of an expert that had any; experts that had any.
  PowerHistogram<15> expert_rows[kNumPhases];     // bounds 1 to 8192
  PowerHistogram<11> active_experts[kNumPhases];  // bounds 1 to 512
  // Parameters that every token uses, embeddings, head and experts excluded (attention, norms,
  // routers, split and merge, shared experts, dense feed-forward).
  int64_t always_active_parameters = 0;
};

// Mean parameters that a token activated, embeddings and head excluded; every (row, expert) pair
// that ran counts. 0 where no token was run.
double MeanActivatedParameters(const ExpertStats& stats);

// Share of routed experts with selections / tokens > threshold, over all blocks (MH-MoE, fig. 1).
double ActivationRatio(const ExpertStats& stats, double threshold);

// What happened between two snapshots of the same model. Counters of `earlier` that are larger
// than those of `later` count as equal: the order of two snapshots is the caller's business.
ExpertStats Difference(const ExpertStats& later, const ExpertStats& earlier);

// Adds the counters of `from`, which must be of the same blocks.
void Accumulate(ExpertStats& to, const ExpertStats& from);

}  // namespace moeserve

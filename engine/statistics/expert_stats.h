// Counters of what the experts did since the start. One count is one (row, chosen expert) pair that
// was computed; a row is a token, or a sub-token in a block that splits tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/spec/spec.h"
#include "engine/step/phase.h"
#include "kernels/route_counters.h"

namespace moeserve {

// Sums over the rows whose router scores were sampled (some rows of every n-th step, where n is
// RecorderOptions::router_stats_interval), without the rows counted in nonfinite_rows. s is a row's
// scores. p is the softmax of s over all experts, or, if the gate is a sigmoid, the sigmoids of s
// divided by their sum.
struct RouterStats {
  uint64_t rows = 0;
  double entropy_sum = 0.0;              // sum of -sum_e p_e ln p_e
  double squared_logsumexp_sum = 0.0;    // sum of (ln sum_e exp s_e)^2, the z-loss
  std::vector<double> probability_sums;  // [E] sums of p_e
  std::vector<uint64_t> selections;      // [E] selections in the sampled rows
};

// Counters of one routed block. Invariants: rows = split_heads * tokens (per phase). With top-k,
// the sum over `selections` is k * rows; with top-p, the sum is between rows and max_selected *
// rows. Rows whose router scores had no finite maximum count with weights of 0. A request that
// overrides the selection is counted with its own k. Recomputed tokens are counted in the
// recomputed_ fields and rejected ones (Phase) in the rejected_ fields; apart from these fields,
// only `visits` includes them.
struct BlockExpertStats {
  Stack stack = Stack::kOnly;
  int layer = 0;  // of its stack
  BlockKind block = BlockKind::kFeedForward;
  int num_experts = 0;
  int split_heads = 1;
  SelectKind select = SelectKind::kTopK;
  int max_selected = 1;
  uint64_t tokens[kNumPhases] = {0, 0};
  uint64_t rows[kNumPhases] = {0, 0};
  std::vector<uint64_t> selections;         // [E] prefill and decode together
  std::vector<uint64_t> decode_selections;  // [E] the part of `selections` in phase kDecode
  std::vector<double> weight_sums;          // [E] sums of the final gate weights
  std::vector<uint64_t> touching_tokens;  // [E] tokens with at least one row that chose the expert
  std::vector<uint64_t> visits;           // [E] steps in which at least one row chose the expert
  std::vector<uint64_t> distinct_histogram;  // [n] tokens that chose n distinct experts, n from 0
  uint64_t nonfinite_rows = 0;  // rows whose router scores had a NaN or no finite maximum
  uint64_t recomputed_tokens = 0;
  uint64_t recomputed_rows = 0;
  std::vector<uint64_t> recomputed_selections;  // [E]
  uint64_t rejected_tokens = 0;
  uint64_t rejected_rows = 0;
  std::vector<uint64_t> rejected_selections;  // [E]
  RouterStats router;
  std::vector<int64_t> expert_parameters;  // [E] number of parameters of each expert
  std::vector<int> expert_widths;  // [E] hidden width; attention expert: width of all its heads;
                                   // 0 for experts without matrices

  uint64_t total_tokens() const { return tokens[0] + tokens[1]; }
  uint64_t total_rows() const { return rows[0] + rows[1]; }
};

struct ExpertStats {
  Stack stack = Stack::kOnly;            // that of all blocks
  uint64_t tokens = 0;                   // computed tokens, without recomputed and rejected ones
  uint64_t recomputed_tokens = 0;        // not included in `tokens`
  uint64_t rejected_tokens = 0;          // not included in `tokens`
  uint64_t steps = 0;                    // steps in which these tokens were computed
  std::vector<BlockExpertStats> blocks;  // by layer, attention before feed_forward
  // [n] tokens that chose n distinct experts, summed over the diversity blocks. These are the
  // blocks that split tokens, or every routed block if none splits. The mean divided by
  // diversity_blocks is the sub-token assign diversity of MH-MoE, fig. 7.
  std::vector<uint64_t> diversity_histogram;
  int diversity_blocks = 0;
  // Histograms over every step and routed block, recomputed and rejected rows included. Index 1 is
  // for steps in which all rows are of phase kDecode or kRejected, index 0 for all other steps.
  // expert_rows counts the rows
  // of each expert that has rows; active_experts counts the experts that have rows.
  PowerHistogram<15> expert_rows[kNumPhases];     // bucket bounds 1 to 8192
  PowerHistogram<11> active_experts[kNumPhases];  // bucket bounds 1 to 512
  // Number of parameters that every token uses: attention, norms, routers, split and merge
  // projections, shared experts, dense feed-forward. Embeddings, LM head and routed experts are
  // excluded.
  int64_t always_active_parameters = 0;
};

// Returns the mean number of parameters that a token activated, embeddings and LM head excluded. An
// expert's parameters count once for every (row, expert) pair. 0 if no token was computed.
double MeanActivatedParameters(const ExpertStats& stats);

// Returns the share of routed experts with selections / tokens > threshold, over all blocks
// (MH-MoE, fig. 1).
double ActivationRatio(const ExpertStats& stats, double threshold);

// Returns what was counted between two snapshots of the same model. A counter that is larger in
// `earlier` than in `later` yields 0; the caller is responsible for the order of the snapshots.
ExpertStats Difference(const ExpertStats& later, const ExpertStats& earlier);

// Adds the counters of `from`, which must have the same blocks, to `to`.
void Accumulate(ExpertStats& to, const ExpertStats& from);

}  // namespace moeserve

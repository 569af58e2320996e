// The terms of the papers' training losses, computed from sampled router scores at inference time.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// Means over the n rows whose router scores s were sampled. p_e(r): the router's probability of
// expert e for row r. T_e: share of the rows that chose e. P_e: mean of p_e. w_e: hidden width of
// e. f_e: e's share of all selections. E: number of experts. All fields are 0 if n is 0.
struct RouterSummary {
  uint64_t rows = 0;
  double entropy_mean = 0.0;             // mean of -sum_e p_e ln p_e, in nats
  double entropy_loss = 0.0;             // HMoE, eq. 5: E sum_e p_e ln p_e, mean over rows
  double z_loss = 0.0;                   // MoA, eq. 16: mean of (ln sum_e exp s_e)^2
  std::vector<double> probability_mean;  // [E] P_e
  // E sum_e T_e P_e: X-MoE, eq. 9 (with the learned temperature); MH-MoE, eq. 10; HMoE, eq. 3
  double balance_loss = 0.0;
  // MoA, eq. 13: E sum_e f_e P_e, with P_e normalised to sum 1
  double normalized_balance_loss = 0.0;
  double parameter_penalty = 0.0;  // HMoE, eq. 4: E sum_e (T_e w_e) P_e; unit: hidden width
};

RouterSummary SummarizeRouter(const BlockExpertStats& block);

}  // namespace moeserve

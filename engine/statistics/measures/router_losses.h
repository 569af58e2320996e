// What the routers' scores say: the terms that the papers train with, as statistics of what ran.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// Computed over the n rows whose router scores were sampled. p_e(r): the router's probability of
// expert e for row r. T_e: share of the rows routed to e. P_e: mean of p_e. w_e: hidden width of e.
// All fields are 0 if n is 0.
struct RouterSummary {
  uint64_t rows = 0;
  double entropy_mean = 0.0;             // of -sum_e p_e ln p_e, nats
  double entropy_loss = 0.0;             // HMoE, eq. 5: E sum_e p_e ln p_e, mean over rows
  double z_loss = 0.0;                   // MoA, eq. 16: mean of (ln sum_e exp s_e)^2
  std::vector<double> probability_mean;  // [E] P_e
  double balance_loss = 0.0;             // E sum_e T_e P_e: X-MoE, eq. 9 with the learned
                                         // temperature; MH-MoE, eq. 10; HMoE, eq. 3
  double normalized_balance_loss = 0.0;  // MoA, eq. 13: E sum_e f_e P_e with f and P of sum 1
  double parameter_penalty = 0.0;        // HMoE, eq. 4: E sum_e (T_e w_e) P_e, in units of width
};

RouterSummary SummarizeRouter(const BlockExpertStats& block);

}  // namespace moeserve

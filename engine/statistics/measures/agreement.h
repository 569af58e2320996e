// How alike two checkpoints or runs of one architecture route (X-MoE, section 4.5).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/statistics/measures/route_sequence.h"

namespace moeserve {

// Routing fluctuation between two runs over the same rows.
struct Fluctuation {
  uint64_t rows = 0;
  double top1 = 0.0;  // share of rows whose expert of largest weight differs
  double sets = 0.0;  // share of rows whose sets of experts differ
};

// Both must have equally many rows.
Fluctuation RoutingFluctuation(const BlockRoutes& a, const BlockRoutes& b);

// Pearson's correlation; NaN where one of them is constant. Equal lengths.
double Correlation(std::span<const double> a, std::span<const double> b);

// Inter-run consistency: mean of the m x m matrix of correlations of load vectors, the diagonal
// included. NaN where a load is constant.
double InterRunConsistency(const std::vector<std::vector<double>>& loads);

}  // namespace moeserve

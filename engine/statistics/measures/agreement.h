// How similarly two checkpoints or runs of one architecture route (X-MoE, section 4.5).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/statistics/measures/route_sequence.h"

namespace moeserve {

// Routing fluctuation between two runs over the same rows.
struct Fluctuation {
  uint64_t rows = 0;
  double top1 = 0.0;  // share of rows whose expert with the largest weight differs
  double sets = 0.0;  // share of rows whose sets of experts differ
};

// Compares two runs, which must have equally many rows.
Fluctuation RoutingFluctuation(const BlockRoutes& a, const BlockRoutes& b);

// Returns Pearson's correlation of two vectors of equal length; NaN if one of them is constant.
double Correlation(std::span<const double> a, std::span<const double> b);

// Returns the inter-run consistency of m runs: the mean of the m x m matrix of correlations between
// their load vectors, the diagonal included. NaN if a load vector is constant.
double InterRunConsistency(const std::vector<std::vector<double>>& loads);

}  // namespace moeserve

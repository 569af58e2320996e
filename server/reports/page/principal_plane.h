// The two directions in which router inputs vary most.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/statistics/hidden_samples.h"

namespace moeserve::server {

struct PrincipalPlane {
  std::vector<double> x, y;  // the coordinates of the points
  std::vector<int> experts;  // the experts of the points
  double explained = 0.0;    // share of the variance of all rows that the plane holds
};

// Returns up to `points` rows, evenly spread over the sample, on the first two principal components
// of all rows. Empty with fewer than three rows or if all are equal. Takes about 60 n width
// operations.
PrincipalPlane PlaneOf(const HiddenSample& sample, size_t points);

}  // namespace moeserve::server

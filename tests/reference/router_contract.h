// A scalar f32 model of the routing contract: every step written out in the order the contract
// fixes, for comparison bit by bit.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/route_settings.h"

namespace moeserve::testing {

struct RouterWeights {
  std::vector<float> weight;      // dot [E, c]; cosine: expert vectors [E, dim]
  std::vector<float> bias;        // empty: none
  std::vector<float> projection;  // cosine [dim, c]
  float temperature = 0.0f;
};

template <typename Real>
struct RowRoutes {
  std::vector<int> experts;  // ascending
  std::vector<Real> weights;
  std::vector<int> ranking;  // all experts by descending score
  std::vector<Real> scores;  // after bias and temperature
  bool saw_nan = false;
  bool no_finite_maximum = false;
  Real margin = 0;  // how far the selection is from another one, in score units
};

// One row under the contract, in f32.
RowRoutes<float> ContractRoutes(const RouteSettings& settings, const RouterWeights& weights,
                                const std::vector<float>& row);

// The same mathematics in double, without the contract's orders and without its exponential.
RowRoutes<double> OracleRoutes(const RouteSettings& settings, const RouterWeights& weights,
                               const std::vector<float>& row);

}  // namespace moeserve::testing

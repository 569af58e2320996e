// A scalar f32 model of the routing contract, which computes every step in the order that the
// contract fixes, for bit-by-bit comparison.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/route_settings.h"

namespace moeserve::testing {

struct RouterWeights {
  std::vector<float> weight;        // dot [E, c]; cosine: expert vectors [E, dim]
  std::vector<float> bias;          // empty if there is none
  std::vector<float> projection;    // cosine [dim, c]
  std::vector<float> choice_bias;   // [E]; empty if there is none
  std::vector<float> row_weight;    // [c]; empty if there is none
  std::vector<float> expert_scale;  // [E]; empty if there is none
  std::vector<int32_t> table;       // [vocabulary, listed]; empty if there is none
  int listed = 0;                   // number of experts that the table lists for a token
  float temperature = 0.0f;
};

template <typename Real>
struct RowRoutes {
  std::vector<int> experts;  // ascending
  std::vector<Real> weights;
  std::vector<int> ranking;  // all experts in the order of selection
  std::vector<Real> scores;  // after bias and temperature
  bool saw_nan = false;
  bool no_finite_maximum = false;
  Real margin = 0;  // the smallest change of a score that changes the selection
};

// Routes one row as the contract defines, in f32. `token` is the row of a table.
RowRoutes<float> ContractRoutes(const RouteSettings& settings, const RouterWeights& weights,
                                const std::vector<float>& row, int token = 0);

// Routes one row by the same formulas in double, without the contract's order of sums and
// exponential function.
RowRoutes<double> OracleRoutes(const RouteSettings& settings, const RouterWeights& weights,
                               const std::vector<float>& row, int token = 0);

}  // namespace moeserve::testing

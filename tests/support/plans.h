// Makes routing plans with routes that a test chooses.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "tests/support/device_rows.h"
#include "tests/support/random.h"

namespace moeserve::testing {

struct Grouped {
  std::unique_ptr<Router> router;  // owns what `plan` points to
  RoutingPlan plan;
};

// Returns a plan that routes row r to the experts routes[r], expert e with weight 0.25 * (e + 1).
inline Grouped MakePlan(Backend& backend, int experts,
                        const std::vector<std::vector<int>>& routes) {
  Grouped g;
  RouteSettings s;
  s.num_experts = experts;
  s.input_width = 1;
  RouterTensors tensors;
  tensors.weight = MakeTensor(std::vector<float>(static_cast<size_t>(experts), 0.0f), {experts, 1});
  g.router = std::move(backend.NewRouter(s, tensors)).value();
  GivenRoutes given;
  given.offsets.push_back(0);
  for (const auto& row : routes) {
    for (int e : row) {
      given.experts.push_back(e);
      given.weights.push_back(0.25f * static_cast<float>(e + 1));
    }
    given.offsets.push_back(static_cast<int32_t>(given.experts.size()));
  }
  const DeviceRows rows = MakeRows(backend, std::vector<float>(routes.size(), 0.0f), 1);
  g.plan = backend.Route({.router = g.router.get(), .input = rows.view, .given = &given});
  return g;
}

}  // namespace moeserve::testing

// Collects the routes of a text while the model computes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/statistics/measures/route_sequence.h"
#include "engine/statistics/step_observer.h"

namespace moeserve {

// Requests must run one after the other, without a prefix cache, so that rows arrive in the order
// of the text. The engine thread adds rows; other threads may read after a request has ended.
class RouteTrace : public StepObserver {
 public:
  explicit RouteTrace(const RouteLayout& layout)
      : layout_(layout), routes_(layout.blocks.size()), weights_(layout.blocks.size()) {}

  ReportContents contents() const override { return {.plans = true}; }
  void OnStep(const Batch& batch, const StepReport& report) override;

  const RouteLayout& layout() const { return layout_; }
  // Returns the routes of each routed block.
  const std::vector<BlockRoutes>& routes() const { return routes_; }
  // Returns for each routed block [A] the final gate weight of every entry of BlockRoutes::experts.
  const std::vector<std::vector<float>>& weights() const { return weights_; }

 private:
  void Add(size_t index, const RoutingPlan& plan);  // adds the plan of routed block `index`

  const RouteLayout layout_;
  std::vector<BlockRoutes> routes_;
  std::vector<std::vector<float>> weights_;
};

}  // namespace moeserve

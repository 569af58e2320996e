#include "engine/statistics/measures/route_trace.h"

namespace moeserve {

void RouteTrace::OnStep(const Batch&, const StepReport& report) {
  for (size_t i = 0; i < report.blocks.size(); ++i) Add(i, report.blocks[i].plan);
}

void RouteTrace::Add(size_t index, const RoutingPlan& plan) {
  BlockRoutes& to = routes_[index];
  for (int r = 0; r < plan.rows; ++r) {
    uint16_t top = BlockRoutes::kNone;
    float best = 0.0f;
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      const auto expert = static_cast<uint16_t>(plan.expert_of_assignment[a]);
      const float weight = plan.weight_of_assignment[a];
      if (top == BlockRoutes::kNone || weight > best) {
        top = expert;
        best = weight;
      }
      to.experts.push_back(expert);
      weights_[index].push_back(weight);
    }
    to.top1.push_back(top);
    to.offsets.push_back(to.experts.size());
  }
}

}  // namespace moeserve

// Where the experts of a routed layer are computed.
#pragma once

#include <cstdint>

#include "engine/step/step_context.h"
#include "kernels/plan_parts.h"

namespace moeserve {

// How the assignments of a step are divided among places. This place computes those of
// `parts.local`. It combines the results of `parts.joint`.
struct PlacedPlan {
  PlanParts parts;
  // How the ranks divide the rows whose results they combine. Not divided: this place combines the
  // results of all rows, and its own are those from row `parts.first` on.
  RowDivision sums = {};
};

// The rows of a routed layer, as far as the places depend on them.
struct PlacedRows {
  int64_t tokens = 0;
  int64_t result_bytes = 0;  // of the result of an assignment
  int64_t output_bytes = 0;  // of a token's output, f32
  // Whether the ranks divide the rows of the step behind the sums, and gather the outputs.
  bool outputs_gathered = false;
};

// The experts of a layer live at places. An implementation says which assignments this place
// computes, and collects the results of other places afterwards. Results are combined in the order
// of experts, so the places do not change the bits. Immutable after loading.
class ExpertPlaces {
 public:
  virtual ~ExpertPlaces() = default;
  // `plan` has all experts, `bodies` its experts that have an index in the body.
  virtual PlacedPlan Divide(StepContext& ctx, const RoutingPlan& plan, const RoutingPlan& bodies,
                            const PlacedRows& rows) const = 0;
  // Fills the rows of `results` [joint.capacity, width] of experts with an index in the body. `own`
  // [local.capacity, width] are the results of this place; if `sums` are not divided, they are a
  // part of `results`.
  virtual void Collect(StepContext& ctx, const PlacedPlan& plan, const RowsView& own,
                       const RowsView& results) const = 0;
};

// All experts are here.
class LocalPlace final : public ExpertPlaces {
 public:
  PlacedPlan Divide(StepContext&, const RoutingPlan& plan, const RoutingPlan& bodies,
                    const PlacedRows&) const override {
    return {.parts = {.local = bodies, .joint = plan, .rows_of_rank = {}}};
  }
  void Collect(StepContext&, const PlacedPlan&, const RowsView&, const RowsView&) const override {}
};

}  // namespace moeserve

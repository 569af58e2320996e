// Where the experts of a routed layer are computed.
#pragma once

#include "engine/step/step_context.h"

namespace moeserve {

// The experts of a layer live at places. An implementation sends rows to other places before this
// place computes its own experts, and collects their results afterwards; `Backend::Exchange()`
// moves rows through the host, also in recorded steps. Results are combined in the order of
// experts, so the places do not change the bits. Immutable after loading.
class ExpertPlaces {
 public:
  virtual ~ExpertPlaces() = default;
  // Sends the rows that other places need, and returns the plan of the assignments that this place
  // computes: `plan` without the others. `rows` [R, width] are the inputs of the experts.
  virtual RoutingPlan Dispatch(StepContext& ctx, const RoutingPlan& plan,
                               const RowsView& rows) const = 0;
  // Fills the rows of `results` [plan.capacity, width] that other places have computed.
  virtual void Collect(StepContext& ctx, const RoutingPlan& plan,
                       const RowsView& results) const = 0;
};

// All experts are here.
class LocalPlace final : public ExpertPlaces {
 public:
  RoutingPlan Dispatch(StepContext&, const RoutingPlan& plan, const RowsView&) const override {
    return plan;
  }
  void Collect(StepContext&, const RoutingPlan&, const RowsView&) const override {}
};

}  // namespace moeserve

// Where the experts of a routed layer are computed.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step/step_context.h"

namespace moeserve {

// How the assignments of a step are divided among places. `here` are those that this place
// computes; the results of `all` are combined, and those of `here` begin at row `first` of them.
struct PlacedPlan {
  RoutingPlan here;
  RoutingPlan all;
  int64_t first = 0;
  std::vector<int64_t> rows_of_rank = {};  // of RankPlaces
};

// The experts of a layer live at places. An implementation says which assignments this place
// computes, and collects the results of other places afterwards. Results are combined in the order
// of experts, so the places do not change the bits. Immutable after loading.
class ExpertPlaces {
 public:
  virtual ~ExpertPlaces() = default;
  // `plan` has all experts, `bodies` its experts that have an index in the body.
  virtual PlacedPlan Divide(StepContext& ctx, const RoutingPlan& plan,
                            const RoutingPlan& bodies) const = 0;
  // Fills the rows of `results` [all.capacity, width] that other places have computed.
  virtual void Collect(StepContext& ctx, const PlacedPlan& plan, const RowsView& results) const = 0;
};

// All experts are here.
class LocalPlace final : public ExpertPlaces {
 public:
  PlacedPlan Divide(StepContext&, const RoutingPlan& plan,
                    const RoutingPlan& bodies) const override {
    return {.here = bodies, .all = plan};
  }
  void Collect(StepContext&, const PlacedPlan&, const RowsView&) const override {}
};

}  // namespace moeserve

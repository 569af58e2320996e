// The experts of a routed layer on several ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/layers/routed/expert_places.h"
#include "engine/weights/expert_placement.h"

namespace moeserve {

// Every rank has all rows and the same plan. The owners of the experts follow from the plan and the
// placement, so nothing is agreed upon; each rank computes the experts that it owns. Then either
// the rows of results are gathered on all ranks, or each rank gets those of its own rows
// (OwnersAdd()).
class RankPlaces final : public ExpertPlaces {
 public:
  // `block` is the index of a routed block in its stack. `share` must outlive the object.
  RankPlaces(const RankShare& share, const ModelSpec& model, int block);

  PlacedPlan Divide(StepContext& ctx, const RoutingPlan& plan, const RoutingPlan& bodies,
                    const PlacedRows& rows) const override;
  void Collect(StepContext& ctx, const PlacedPlan& plan, const RowsView& own,
               const RowsView& results) const override;

 private:
  const RankShare& share_;
  const Stack stack_;
  const std::vector<int64_t> parameters_;
  const int slot_;
};

}  // namespace moeserve

#include "engine/layers/routed/rank_places.h"

#include "base/check.h"
#include "engine/balance/load_watch.h"
#include "kernels/rank_ops.h"

namespace moeserve {

RankPlaces::RankPlaces(const RankShare& share, const ModelSpec& model, int block)
    : share_(share),
      stack_(model.stack),
      parameters_(PlaceParameters(model.blocks[static_cast<size_t>(block)])),
      slot_(block) {}

PlacedPlan RankPlaces::Divide(StepContext& ctx, const RoutingPlan& plan,
                              const RoutingPlan& bodies) const {
  const std::span<const int32_t> offsets = ctx.backend.rank_ops()->ExpertOffsets(plan);
  const auto places = static_cast<size_t>(bodies.num_experts);
  const Exchange& exchange = *share_.exchange;
  const std::vector<HolderSet>& holders = share_.placement->holders(stack_, slot_);
  MOESERVE_CHECK(places == holders.size(), "holders of all experts with an index in the body");
  std::vector<int32_t> rows;
  for (size_t e = 0; e < places; ++e) {
    rows.push_back(offsets[e + 1] - offsets[e]);
  }
  std::vector<int> owners = OwnersOf(rows, parameters_, holders, exchange.ranks());
  if (share_.watch != nullptr) {
    share_.watch->Add({stack_, slot_}, rows,
                      Imbalance(rows, parameters_, owners, exchange.ranks()));
  }
  owners.resize(static_cast<size_t>(plan.num_experts), kNoOwner);
  PlanParts parts = ctx.backend.rank_ops()->Divide(plan,
                                                   {.of_expert = owners,
                                                    .ranks = exchange.ranks(),
                                                    .rank = exchange.rank(),
                                                    .places = bodies.num_experts,
                                                    .expert_offsets = offsets},
                                                   slot_);
  return {.here = parts.local,
          .all = parts.joint,
          .first = parts.first,
          .rows_of_rank = std::move(parts.rows_of_rank)};
}

void RankPlaces::Collect(StepContext& ctx, const PlacedPlan& plan, const RowsView& results) const {
  RankOps& ranks = *ctx.backend.rank_ops();
  ranks.StartGather(results, plan.rows_of_rank, *share_.exchange);
  ranks.FinishGather(*share_.exchange);
}

}  // namespace moeserve

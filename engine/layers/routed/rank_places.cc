#include "engine/layers/routed/rank_places.h"

#include "base/check.h"
#include "engine/balance/load_watch.h"
#include "engine/layers/routed/owner_sums.h"
#include "kernels/rank_ops.h"

namespace moeserve {

RankPlaces::RankPlaces(const RankShare& share, const ModelSpec& model, int block)
    : share_(share),
      stack_(model.stack),
      parameters_(PlaceParameters(model.blocks[static_cast<size_t>(block)])),
      slot_(block) {}

PlacedPlan RankPlaces::Divide(StepContext& ctx, const RoutingPlan& plan, const RoutingPlan& bodies,
                              const PlacedRows& placed) const {
  const std::span<const int32_t> offsets = ctx.backend.rank_ops()->ExpertOffsets(plan);
  const auto places = static_cast<size_t>(bodies.num_experts);
  Exchange& exchange = *share_.exchange;
  const std::vector<HolderSet>& holders = share_.placement->holders(stack_, slot_);
  MOESERVE_CHECK(places == holders.size(), "holders of all experts with an index in the body");
  std::vector<int32_t> rows;
  for (size_t e = 0; e < places; ++e) {
    rows.push_back(offsets[e + 1] - offsets[e]);
  }
  std::vector<int> owners = OwnersOf(rows, parameters_, holders, exchange.ranks());
  if (share_.watch != nullptr || ctx.times != nullptr) {
    const double imbalance = Imbalance(rows, parameters_, owners, exchange.ranks());
    if (share_.watch != nullptr) share_.watch->Add({stack_, slot_}, rows, imbalance);
    if (ctx.times != nullptr) {
      ctx.times->imbalance += imbalance;
      ++ctx.times->blocks;
    }
  }
  SumCosts costs{.ranks = exchange.ranks(),
                 .result_bytes = placed.result_bytes,
                 .tokens = placed.tokens,
                 .sum_bytes = placed.output_bytes,
                 .outputs_gathered = placed.outputs_gathered};
  for (size_t e = 0; e < places; ++e) {
    if (owners[e] != kNoOwner) costs.results += rows[e];
  }
  owners.resize(static_cast<size_t>(plan.num_experts), kNoOwner);
  PlanOwners divided{.of_expert = owners,
                     .ranks = exchange.ranks(),
                     .rank = exchange.rank(),
                     .places = bodies.num_experts,
                     .expert_offsets = offsets};
  PlacedPlan result;
  std::vector<int64_t> row_begin;
  if (OwnersAdd(share_.owner_sums, costs)) {
    result.sums = RowDivision(placed.tokens, exchange);
    row_begin = result.sums.FirstRows(plan.rows);
    divided.row_begin = row_begin;
  }
  result.parts = ctx.backend.rank_ops()->Divide(plan, divided, slot_);
  return result;
}

void RankPlaces::Collect(StepContext& ctx, const PlacedPlan& plan, const RowsView& own,
                         const RowsView& results) const {
  RankOps& ranks = *ctx.backend.rank_ops();
  Exchange& exchange = *share_.exchange;
  const PlanParts& parts = plan.parts;
  if (!plan.sums.divided()) {
    ranks.StartGather(results, parts.rows_of_rank, exchange);
    return ranks.FinishGather(exchange);
  }
  const Workspace::Scope scope(ctx.workspace);
  const int64_t kept = parts.rows_of_rank[static_cast<size_t>(exchange.rank())];
  const RowsView packed = ctx.workspace.Take(own.rows - kept, own.cols, own.dtype);
  ranks.StartScatter(own, parts, packed, results, exchange);
  ranks.FinishScatter(exchange);
}

}  // namespace moeserve

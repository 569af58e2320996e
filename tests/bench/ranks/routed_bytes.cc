#include "tests/bench/ranks/routed_bytes.h"

#include <vector>

#include "engine/layers/routed/owner_sums.h"
#include "engine/routes/route_layout.h"

namespace moeserve {
namespace {

void Add(RoutedBytes& bytes, const ModelSpec& spec, int slot, const RoutingPlan& plan,
         const ExpertPlacement& placement, SplitChoice owner_sums) {
  const int ranks = placement.ranks();
  const int64_t d = spec.hidden_size, tokens = plan.rows;
  const int64_t all = int64_t{plan.num_assignments} * d * 2, sums = tokens * d * 4;
  const bool owners_add = OwnersAdd(owner_sums, {.ranks = ranks,
                                                 .results = plan.num_assignments,
                                                 .result_bytes = d * 2,
                                                 .tokens = tokens,
                                                 .sum_bytes = d * 4});
  if (!owners_add) {
    bytes.sent += all * (ranks - 1);
    bytes.expected += all * (ranks - 1);
    return;
  }
  std::vector<int32_t> rows;
  for (int e = 0; e < plan.num_experts; ++e) {
    rows.push_back(plan.expert_offsets[e + 1] - plan.expert_offsets[e]);
  }
  const std::vector<int> owners =
      OwnersOf(rows, PlaceParameters(spec.blocks[static_cast<size_t>(slot)]),
               placement.holders(spec.stack, slot), ranks);
  for (int32_t a = 0; a < plan.num_assignments; ++a) {
    const int64_t owner = owners[static_cast<size_t>(plan.expert_of_assignment[a])];
    const int64_t token = plan.row_of_assignment[a];
    const bool kept = token >= tokens * owner / ranks && token < tokens * (owner + 1) / ranks;
    if (!kept) bytes.sent += d * 2;
  }
  bytes.sent += sums * (ranks - 1);
  bytes.expected += all * (ranks - 1) / ranks + sums * (ranks - 1);
}

}  // namespace

RoutedBytes BytesOfExperts(Model& model, KvCacheStorage& cache, const Work& work, int ranks,
                           SplitChoice owner_sums) {
  const ModelSpec& spec = model.spec();
  const ExpertPlacement placement = ExpertPlacement::Balanced(spec, ranks);
  const RouteLayout layout(spec);
  RoutedBytes bytes;
  for (const Batch& batch : work.batches) {
    std::vector<float> logits(batch.logit_rows.size() * static_cast<size_t>(spec.vocab_size));
    StepOptions step;
    step.report.plans = true;
    const StepReport report = model.Forward(batch, cache, step, {.logits = logits});
    for (const BlockReport& block : report.blocks) {
      const int slot = layout.blocks[static_cast<size_t>(block.index)].slot;
      Add(bytes, spec, slot, block.plan, placement, owner_sums);
    }
  }
  return bytes;
}

}  // namespace moeserve

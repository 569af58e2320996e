#include "engine/weights/expert_placement.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "engine/weights/place_experts.h"

namespace moeserve {
namespace {

// Returns 0, 1, ... in descending order of `values`; equal values keep their order.
std::vector<size_t> Descending(std::span<const int64_t> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return values[a] > values[b]; });
  return order;
}

// Returns what an expert costs a step in which it has rows.
int64_t CostOf(int32_t rows, int64_t parameters) {
  constexpr int64_t kLeastRows = 8;  // fewer rows take the same time
  return std::max<int64_t>(rows, kLeastRows) * parameters;
}

}  // namespace

std::vector<int64_t> PlaceParameters(const BlockSpec& block) {
  const RoutedLayerSpec& routing = *block.routing();
  if (block.feed_forward() == nullptr) {
    return std::vector<int64_t>(static_cast<size_t>(routing.num_places()), 1);
  }
  const std::vector<int> widths = routing.PlaceWidths();
  return {widths.begin(), widths.end()};
}

ExpertPlacement ExpertPlacement::Balanced(const ModelSpec& model, int ranks) {
  return PlaceExperts(model, {.ranks = ranks});
}

const std::vector<HolderSet>& ExpertPlacement::holders(Stack stack, int block) const {
  const auto found = blocks_.find({stack, block});
  MOESERVE_CHECK(found != blocks_.end(), "a routed block");
  return found->second;
}

std::vector<int> OwnersOf(std::span<const int32_t> rows, std::span<const int64_t> parameters,
                          std::span<const HolderSet> holders, int ranks) {
  std::vector<int64_t> costs(rows.size());
  for (size_t e = 0; e < costs.size(); ++e) costs[e] = CostOf(rows[e], parameters[e]);
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  std::vector<int> owners(rows.size(), -1);
  for (const size_t e : Descending(costs)) {
    for (int r = 0; r < ranks; ++r) {
      if ((holders[e] >> r & 1) == 0) continue;
      const int best = owners[e];
      if (best < 0 || load[static_cast<size_t>(r)] < load[static_cast<size_t>(best)]) owners[e] = r;
    }
    // Experts without rows cost nothing in this step.
    if (owners[e] >= 0 && rows[e] > 0) load[static_cast<size_t>(owners[e])] += costs[e];
  }
  return owners;
}

double Imbalance(std::span<const int32_t> rows, std::span<const int64_t> parameters,
                 std::span<const int> owners, int ranks) {
  std::vector<int64_t> costs(static_cast<size_t>(ranks));
  for (size_t e = 0; e < parameters.size(); ++e) {
    if (rows[e] > 0 && owners[e] >= 0) {
      costs[static_cast<size_t>(owners[e])] += CostOf(rows[e], parameters[e]);
    }
  }
  const int64_t all = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  if (all == 0) return 0.0;
  return static_cast<double>(*std::ranges::max_element(costs)) * ranks / static_cast<double>(all);
}

}  // namespace moeserve

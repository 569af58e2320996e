#include "engine/weights/expert_placement.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace moeserve {
namespace {

// Returns 0, 1, ... in descending order of `values`; equal values keep their order.
std::vector<size_t> Descending(std::span<const int64_t> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return values[a] > values[b]; });
  return order;
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
  MOESERVE_CHECK(ranks >= 1 && ranks <= kMaxRanks, "number of ranks");
  ExpertPlacement placement;
  placement.ranks_ = ranks;
  std::vector<int64_t> total(static_cast<size_t>(ranks));
  for (const ModelSpec* stack : {&model, model.encoder.get(), model.prediction.get()}) {
    if (stack == nullptr) continue;
    for (size_t b = 0; b < stack->blocks.size(); ++b) {
      const BlockSpec& block = stack->blocks[b];
      if (block.routing() == nullptr) continue;
      const std::vector<int64_t> parameters = PlaceParameters(block);
      std::vector<HolderSet> holders(parameters.size());
      std::vector<int64_t> load(static_cast<size_t>(ranks));
      for (const size_t e : Descending(parameters)) {
        if (parameters[e] == 0) continue;
        size_t least = 0;
        for (size_t r = 1; r < load.size(); ++r) {
          if (std::pair(load[r], total[r]) < std::pair(load[least], total[least])) least = r;
        }
        load[least] += parameters[e];
        holders[e] = HolderSet{1} << least;
      }
      for (size_t r = 0; r < load.size(); ++r) total[r] += load[r];
      placement.blocks_[{stack->stack, static_cast<int>(b)}] = std::move(holders);
    }
  }
  return placement;
}

const std::vector<HolderSet>& ExpertPlacement::holders(Stack stack, int block) const {
  const auto found = blocks_.find({stack, block});
  MOESERVE_CHECK(found != blocks_.end(), "a routed block");
  return found->second;
}

std::vector<int> OwnersOf(std::span<const int32_t> rows, std::span<const int64_t> parameters,
                          std::span<const HolderSet> holders, int ranks) {
  constexpr int64_t kLeastRows = 8;  // fewer rows take the same time
  std::vector<int64_t> costs(rows.size());
  for (size_t e = 0; e < costs.size(); ++e) {
    costs[e] = std::max<int64_t>(rows[e], kLeastRows) * parameters[e];
  }
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

}  // namespace moeserve

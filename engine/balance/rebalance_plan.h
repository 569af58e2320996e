// Plans a better placement of experts for a model that runs.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/weights/place_experts.h"

namespace moeserve {

struct RebalanceLimits {
  double imbalance = 1.10;  // a block that is predicted to be at most so unequal stays as it is
  double gain = 0.05;       // and so does one whose imbalance would not shrink by this share
  int64_t bytes = int64_t{256} << 20;  // that ranks load, all together
};

struct RebalancePlan {
  ExpertPlacement placement;  // with the next version
  int64_t bytes = 0;          // that ranks have to load
};

// Returns the predicted imbalance of a block: the largest load x parameters of a rank / the mean.
// The load of an expert is divided equally between its holders. 1 without loads.
double PredictedImbalance(const std::vector<HolderSet>& holders, const std::vector<double>& loads,
                          const std::vector<int64_t>& parameters, int ranks);

// Returns a placement in which some experts have changed ranks, or nothing if no block gains
// enough. Every expert keeps its number of holders. Experts are exchanged between two ranks, so
// that ranks keep about the bytes that they have. The most unequal blocks come first. `parameters`
// and `bytes` are the sizes of all experts; blocks without loads stay as they are.
std::optional<RebalancePlan> PlanRebalance(const ExpertPlacement& placement,
                                           const ExpertLoads& loads, const ExpertSizes& parameters,
                                           const ExpertSizes& bytes,
                                           const RebalanceLimits& limits = {});

}  // namespace moeserve

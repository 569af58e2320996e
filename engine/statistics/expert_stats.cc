#include "engine/statistics/expert_stats.h"

#include <algorithm>

#include "engine/statistics/stats_fields.h"

namespace moeserve {

double MeanActivatedParameters(const ExpertStats& stats) {
  if (stats.tokens == 0) return 0.0;
  double experts = 0.0;
  for (const BlockExpertStats& b : stats.blocks) {
    for (int e = 0; e < b.num_experts; ++e) {
      experts += static_cast<double>(b.selections[e]) * static_cast<double>(b.expert_parameters[e]);
    }
  }
  return static_cast<double>(stats.always_active_parameters) +
         experts / static_cast<double>(stats.tokens);
}

double ActivationRatio(const ExpertStats& stats, double threshold) {
  int64_t experts = 0, active = 0;
  for (const BlockExpertStats& b : stats.blocks) {
    const double tokens = static_cast<double>(b.total_tokens());
    experts += b.num_experts;
    for (uint64_t n : b.selections) {
      if (tokens > 0 && static_cast<double>(n) / tokens > threshold) ++active;
    }
  }
  return experts == 0 ? 0.0 : static_cast<double>(active) / static_cast<double>(experts);
}

ExpertStats Difference(const ExpertStats& later, const ExpertStats& earlier) {
  ExpertStats out = later;
  ForEachCounterOfModel(out, earlier, [](auto& to, const auto& from) { to -= std::min(to, from); });
  return out;
}

void Accumulate(ExpertStats& to, const ExpertStats& from) {
  ForEachCounterOfModel(to, from, [](auto& sum, const auto& value) { sum += value; });
}

}  // namespace moeserve

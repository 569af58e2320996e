#include "engine/statistics/measures/initial_balance.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/check.h"

namespace moeserve {

InitialBalanceObserver::InitialBalanceObserver(const ModelSpec& spec,
                                               std::vector<std::optional<double>> temperatures,
                                               std::optional<double> initial) {
  const RouteLayout layout(spec);
  MOESERVE_CHECK(temperatures.size() == layout.blocks.size(), "a temperature for each block");
  for (size_t i = 0; i < layout.blocks.size(); ++i) {
    const RoutedLayerSpec& routing = RoutingOf(spec, layout.blocks[i]);
    const bool sigmoid = routing.gate == GateKind::kSigmoid;
    const auto experts = static_cast<size_t>(routing.num_experts);
    blocks_.push_back(
        {.temperature = temperatures[i],
         .initial = initial.value_or(sigmoid ? kInitialSigmoidTemperature : kInitialTemperature),
         .selections = std::vector<uint64_t>(experts),
         .probabilities = std::vector<double>(experts)});
  }
}

void InitialBalanceObserver::OnStep(const Batch&, const StepReport& report) {
  std::vector<double> p;
  for (const BlockReport& block : report.blocks) {
    Sums& sums = blocks_[static_cast<size_t>(block.index)];
    if (!sums.temperature) continue;
    const size_t experts = sums.selections.size();
    // The reported scores are s / tau.
    const double factor = *sums.temperature / sums.initial;
    p.resize(experts);
    for (size_t first = 0; first + experts <= block.scores.size(); first += experts) {
      const std::span<const float> scores = block.scores.subspan(first, experts);
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0.0;
      for (size_t e = 0; e < experts; ++e) {
        p[e] = std::exp((static_cast<double>(scores[e]) - top) * factor);
        sum += p[e];
      }
      for (size_t e = 0; e < experts; ++e) sums.probabilities[e] += p[e] / sum;
    }
    sums.rows += static_cast<uint64_t>(block.plan.rows);
    for (size_t e = 0; e < experts; ++e) {
      sums.selections[e] +=
          static_cast<uint64_t>(block.plan.expert_offsets[e + 1] - block.plan.expert_offsets[e]);
    }
  }
}

std::optional<InitialBalance> InitialBalanceObserver::Of(size_t block) const {
  const Sums& sums = blocks_[block];
  if (!sums.temperature) return std::nullopt;
  InitialBalance out{.initial = sums.initial, .temperature = *sums.temperature};
  if (sums.rows == 0) return out;
  const double rows = static_cast<double>(sums.rows);
  for (size_t e = 0; e < sums.selections.size(); ++e) {
    out.loss += static_cast<double>(sums.selections.size()) *
                (static_cast<double>(sums.selections[e]) / rows) * (sums.probabilities[e] / rows);
  }
  return out;
}

}  // namespace moeserve

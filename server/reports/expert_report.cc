#include "server/reports/expert_report.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/statistic_list.h"
#include "server/reports/stack_experts.h"
#include "server/reports/statistic_json.h"

namespace moeserve::server {

OrderedJson ExpertStatsJson(const ExpertStats& stats, const std::string& model,
                            std::optional<double> window_seconds, double threshold) {
  const StatisticOptions options{.threshold = threshold};
  OrderedJson out;
  out["model"] = model;
  const auto name_stack = [](OrderedJson& to, Stack stack) {
    if (stack != Stack::kOnly) to["stack"] = KindName(stack);
  };
  name_stack(out, stats.stack);
  out["window_seconds"] = window_seconds ? OrderedJson(*window_seconds) : OrderedJson(nullptr);
  AddStatistics(out, ModelStatistics(), stats, options);
  OrderedJson layers = OrderedJson::array();
  for (const BlockExpertStats& block : stats.blocks) {
    OrderedJson& layer = layers.emplace_back();
    name_stack(layer, block.stack);
    AddStatistics(layer, BlockStatistics(), block, options);
  }
  out["layers"] = std::move(layers);
  return out;
}

OrderedJson StacksJson(const std::vector<ExpertStats>& stacks) {
  OrderedJson out;
  for (const ExpertStats& stats : stacks) {
    out[std::string(KindName(stats.stack))] = {
        {"tokens", stats.tokens},
        {"activated_parameters_per_token", MeanActivatedParameters(stats)}};
  }
  out["activated_parameters_per_token"] = MeanActivatedParameters(stacks);
  return out;
}

std::string ExpertStatsTable(const ExpertStats& stats, double threshold) {
  std::string out;
  char line[256];
  const auto add = [&](auto... arguments) {
    const int length = std::snprintf(line, sizeof(line), arguments...);
    out.append(line, std::min(static_cast<size_t>(std::max(length, 0)), sizeof(line) - 1));
  };
  add("%5s  %-12s  %7s  %10s  %8s  %8s  %8s  %7s  %9s\n", "layer", "block", "experts", "rows",
      "per row", "distinct", "balance", "entropy", "top share");
  for (const BlockExpertStats& block : stats.blocks) {
    const std::vector<double> selections(block.selections.begin(), block.selections.end());
    const double total = std::accumulate(selections.begin(), selections.end(), 0.0);
    const double top =
        selections.empty() ? 0.0 : *std::max_element(selections.begin(), selections.end());
    const double rows = static_cast<double>(block.total_rows());
    const LoadShape spread = MeasureLoad(selections);
    add("%5d  %-12s  %7d  %10.0f  %8.3f  %8.3f  %8.3f  %7.3f  %8.1f%%\n", block.layer,
        Name(block.block), block.num_experts, rows, rows > 0 ? total / rows : 0.0,
        MeanDistinctExperts(block), spread.balance, spread.entropy,
        total > 0 ? 100.0 * top / total : 0.0);
  }
  add("tokens %llu, activation ratio %.4f (share of experts chosen by more than %g of the "
      "tokens)\n",
      static_cast<unsigned long long>(stats.tokens), ActivationRatio(stats, threshold), threshold);
  add("activated parameters per token %.0f (always active %lld)\n", MeanActivatedParameters(stats),
      static_cast<long long>(stats.always_active_parameters));
  return out;
}

}  // namespace moeserve::server

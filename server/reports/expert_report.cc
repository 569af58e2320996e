#include "server/reports/expert_report.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "server/metrics/expert_balance.h"
#include "server/reports/statistics_report.h"

namespace moeserve::server {

using Json = nlohmann::ordered_json;

double MeanDistinctExperts(const BlockExpertStats& block) {
  double tokens = 0.0;
  double sum = 0.0;
  for (size_t n = 0; n < block.distinct_histogram.size(); ++n) {
    tokens += static_cast<double>(block.distinct_histogram[n]);
    sum += static_cast<double>(n) * static_cast<double>(block.distinct_histogram[n]);
  }
  return tokens > 0.0 ? sum / tokens : 0.0;
}

Json ExpertStatsJson(const ExpertStats& stats, const std::string& model,
                     std::optional<double> window_seconds, double threshold) {
  Json out;
  out["model"] = model;
  out["window_seconds"] = window_seconds ? Json(*window_seconds) : Json(nullptr);
  out["tokens"] = stats.tokens;
  out["activation_ratio"] = ActivationRatio(stats, threshold);
  out["activation_threshold"] = threshold;
  out["activated_parameters_per_token"] = MeanActivatedParameters(stats);
  out["always_active_parameters"] = stats.always_active_parameters;
  AddModelStatistics(out, stats);
  Json layers = Json::array();
  for (const BlockExpertStats& block : stats.blocks) {
    Json layer;
    layer["layer"] = block.layer;
    layer["block"] = Name(block.block);
    layer["experts"] = block.num_experts;
    layer["select"] = block.select == SelectKind::kTopK ? "top_k" : "top_p";
    layer["max_selected"] = block.max_selected;
    layer["split_heads"] = block.split_heads;
    layer["rows"] = block.total_rows();
    layer["tokens"] = block.total_tokens();
    layer["counts"] = block.selections;
    layer["weight_sums"] = block.weight_sums;
    layer["distinct_experts_histogram"] = block.distinct_histogram;
    layer["distinct_experts_mean"] = MeanDistinctExperts(block);
    layer["nonfinite_rows"] = block.nonfinite_rows;
    layer["expert_parameters"] = block.expert_parameters;
    AddBlockStatistics(layer, block, threshold);
    layers.push_back(std::move(layer));
  }
  out["layers"] = std::move(layers);
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
    const ExpertBalance spread = MeasureBalance(selections);
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

#include "server/expert_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "server/statistics_report.h"

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

LoadShape MeasureLoad(const std::vector<double>& selections) {
  LoadShape shape;
  const double total = std::accumulate(selections.begin(), selections.end(), 0.0);
  if (selections.empty() || total <= 0.0) {
    shape.unused = static_cast<int>(selections.size());
    return shape;
  }
  const double max = *std::max_element(selections.begin(), selections.end());
  const double count = static_cast<double>(selections.size());
  double entropy = 0.0;
  for (const double value : selections) {
    if (value <= 0.0) {
      ++shape.unused;
    } else {
      entropy -= value / total * std::log(value / total);
    }
  }
  shape.balance = total / count / max;
  shape.entropy = selections.size() > 1 ? std::min(1.0, entropy / std::log(count)) : 1.0;
  return shape;
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
    const LoadShape shape = MeasureLoad(selections);
    add("%5d  %-12s  %7d  %10.0f  %8.3f  %8.3f  %8.3f  %7.3f  %8.1f%%\n", block.layer,
        Name(block.block), block.num_experts, rows, rows > 0 ? total / rows : 0.0,
        MeanDistinctExperts(block), shape.balance, shape.entropy,
        total > 0 ? 100.0 * top / total : 0.0);
  }
  add("tokens %llu, activation ratio %.4f (share of experts chosen by more than %g of the "
      "tokens)\n",
      static_cast<unsigned long long>(stats.tokens), ActivationRatio(stats, threshold), threshold);
  add("activated parameters per token %.0f (always active %lld)\n", MeanActivatedParameters(stats),
      static_cast<long long>(stats.always_active_parameters));
  return out;
}

void ExpertMetrics::Decay(const ExpertStats& stats, absl::Time now) {
  constexpr double kHalfLifeSeconds = 60.0;
  const double elapsed =
      last_ == absl::InfinitePast() ? 0.0 : std::max(0.0, absl::ToDoubleSeconds(now - last_));
  const double keep = std::exp2(-elapsed / kHalfLifeSeconds);
  last_ = now;
  window_.resize(stats.blocks.size());
  seen_.resize(stats.blocks.size());
  for (size_t b = 0; b < stats.blocks.size(); ++b) {
    const std::vector<uint64_t>& counts = stats.blocks[b].selections;
    window_[b].resize(counts.size());
    seen_[b].resize(counts.size());
    for (size_t e = 0; e < counts.size(); ++e) {
      // Two readers can come with snapshots in the wrong order: the older one adds nothing.
      const uint64_t seen = std::max(seen_[b][e], counts[e]);
      window_[b][e] = window_[b][e] * keep + static_cast<double>(seen - seen_[b][e]);
      seen_[b][e] = seen;
    }
  }
  const uint64_t tokens = std::max(seen_tokens_, stats.tokens);
  window_tokens_ = window_tokens_ * keep + static_cast<double>(tokens - seen_tokens_);
  seen_tokens_ = tokens;
}

void ExpertMetrics::Write(PrometheusText& text, const ExpertStats& stats, const std::string& model,
                          absl::Time now) {
  std::lock_guard lock(mutex_);
  Decay(stats, now);
  size_t series = 0;
  for (const BlockExpertStats& block : stats.blocks) series += block.selections.size();
  const bool full = series <= kAutoFullSeries;

  struct Labels {
    std::string layer;
    const char* block;
  };
  std::vector<Labels> labels;
  for (const BlockExpertStats& block : stats.blocks) {
    labels.push_back({std::to_string(block.layer), Name(block.block)});
  }
  const auto each_block = [&](auto&& write) {
    for (size_t b = 0; b < stats.blocks.size(); ++b) write(b, stats.blocks[b], labels[b]);
  };

  text.Family("moe_info", "gauge", "The routed blocks of the model.");
  each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
    text.Sample({{"model", model},
                 {"layer", l.layer},
                 {"block", l.block},
                 {"experts", std::to_string(block.num_experts)},
                 {"select", block.select == SelectKind::kTopK ? "top_k" : "top_p"},
                 {"top_k", std::to_string(block.max_selected)},
                 {"split_heads", std::to_string(block.split_heads)},
                 {"mode", full ? "full" : "top"}},
                1.0);
  });
  constexpr const char* kPhases[kNumPhases] = {"prefill", "decode"};
  text.Family("moe_layer_tokens_total", "counter", "Tokens run through a routed block.");
  each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
    for (int p = 0; p < kNumPhases; ++p) {
      text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}, {"phase", kPhases[p]}},
                  block.tokens[p]);
    }
  });
  text.Family("moe_layer_rows_total", "counter", "Rows routed: tokens, or sub-tokens where split.");
  each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
    for (int p = 0; p < kNumPhases; ++p) {
      text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}, {"phase", kPhases[p]}},
                  block.rows[p]);
    }
  });
  if (full) {
    text.Family("moe_expert_tokens_total", "counter", "Rows that chose the expert.");
    each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
      for (size_t e = 0; e < block.selections.size(); ++e) {
        text.Sample({{"model", model},
                     {"layer", l.layer},
                     {"block", l.block},
                     {"expert", std::to_string(e)}},
                    block.selections[e]);
      }
    });
  }
  text.Family("moe_router_nonfinite_total", "counter", "Rows with NaN or Inf in router scores.");
  each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}}, block.nonfinite_rows);
  });

  text.Family("moe_layer_load_balance_ratio", "gauge", "Mean over maximum load of the experts.");
  each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                MeasureLoad(window_[b]).balance);
  });
  text.Family("moe_layer_load_entropy_ratio", "gauge", "Entropy of the load over its maximum.");
  each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                MeasureLoad(window_[b]).entropy);
  });
  text.Family("moe_layer_unused_experts", "gauge", "Experts that no row chose in the window.");
  each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                static_cast<double>(MeasureLoad(window_[b]).unused));
  });
  text.Family("moe_window_tokens", "gauge", "Tokens in the decaying window of the load gauges.");
  text.Sample({{"model", model}}, window_tokens_);

  if (!full) {
    // Too many experts for a series each: the most used ones stand for the rest.
    constexpr size_t kRanks = 4;
    std::vector<std::vector<size_t>> hottest(window_.size());
    for (size_t b = 0; b < window_.size(); ++b) {
      std::vector<size_t>& order = hottest[b];
      order.resize(window_[b].size());
      std::iota(order.begin(), order.end(), size_t{0});
      const size_t ranks = std::min(kRanks, order.size());
      std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(ranks),
                        order.end(), [&](size_t x, size_t y) {
                          return window_[b][x] != window_[b][y] ? window_[b][x] > window_[b][y]
                                                                : x < y;
                        });
      order.resize(ranks);
    }
    const auto each_rank = [&](auto&& value) {
      each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
        for (size_t r = 0; r < hottest[b].size(); ++r) {
          text.Sample({{"model", model},
                       {"layer", l.layer},
                       {"block", l.block},
                       {"rank", std::to_string(r + 1)}},
                      value(b, hottest[b][r]));
        }
      });
    };
    text.Family("moe_hot_expert_share_ratio", "gauge", "Share of the most used experts.");
    each_rank([&](size_t b, size_t e) {
      const double total = std::accumulate(window_[b].begin(), window_[b].end(), 0.0);
      return total > 0.0 ? window_[b][e] / total : 0.0;
    });
    text.Family("moe_hot_expert_id", "gauge", "Numbers of the most used experts.");
    each_rank([&](size_t, size_t e) { return static_cast<double>(e); });
  }

  text.Family("moe_activation_ratio", "gauge", "Share of experts that were chosen at all.");
  text.Sample({{"model", model}}, ActivationRatio(stats, 0.0));
  text.Family("moe_activated_parameters_per_token", "gauge", "Mean parameters a token used.");
  text.Sample({{"model", model}}, MeanActivatedParameters(stats));
}

}  // namespace moeserve::server

#include "server/metrics/expert_metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "base/message.h"
#include "server/metrics/expert_balance.h"

namespace moeserve::server {
namespace {

constexpr MoeMetricsMode kModes[] = {MoeMetricsMode::kOff, MoeMetricsMode::kLayer,
                                     MoeMetricsMode::kTop, MoeMetricsMode::kFull,
                                     MoeMetricsMode::kAuto};

// Bounds of the histograms of steps.
constexpr std::array kPowersOfTwo = {1.,   2.,   4.,   8.,    16.,   32.,   64.,
                                     128., 256., 512., 1024., 2048., 4096., 8192.};

}  // namespace

const char* Name(MoeMetricsMode mode) {
  switch (mode) {
    case MoeMetricsMode::kOff:
      return "off";
    case MoeMetricsMode::kLayer:
      return "layer";
    case MoeMetricsMode::kTop:
      return "top";
    case MoeMetricsMode::kFull:
      return "full";
    case MoeMetricsMode::kAuto:
      return "auto";
  }
  return "";
}

Result<MoeMetricsMode> ParseMoeMetricsMode(const std::string& word) {
  for (const MoeMetricsMode mode : kModes) {
    if (word == Name(mode)) return mode;
  }
  return absl::InvalidArgumentError(
      Concat("--moe-metrics: expected off, layer, top, full or auto, found ", Printable(word, 32)));
}

Result<MoeMetricsOptions> ResolveMoeMetrics(MoeMetricsOptions options, const ExpertStats& stats) {
  size_t experts = 0;
  for (const BlockExpertStats& block : stats.blocks) experts += block.selections.size();
  if (options.mode == MoeMetricsMode::kAuto) {
    options.mode =
        experts <= MoeMetricsOptions::kMaxAutoSeries ? MoeMetricsMode::kFull : MoeMetricsMode::kTop;
  }
  if (options.weights && options.mode != MoeMetricsMode::kFull) {
    return absl::InvalidArgumentError(
        Concat("--moe-expert-weights needs --moe-metrics=full, found ", Name(options.mode),
               " (the "
               "model has ",
               experts, " experts in its blocks together)"));
  }
  const size_t series = experts * (options.weights ? 2 : 1);
  if (options.mode == MoeMetricsMode::kFull && series > MoeMetricsOptions::kMaxSeries) {
    return absl::InvalidArgumentError(Concat("--moe-metrics=full would export ", series,
                                             " series for ", experts, " experts: expected at most ",
                                             MoeMetricsOptions::kMaxSeries,
                                             "; top exports the most used experts of each layer"));
  }
  return options;
}

ExpertMetrics::ExpertMetrics(const MoeMetricsOptions& options, const ModelSpec& spec)
    : options_(options) {
  for (const LayerSpec& layer : spec.layers) {
    has_shared_expert_.push_back(layer.feed_forward.shared_width > 0);
  }
}

void ExpertMetrics::Observe(const ExpertStats& stats, absl::Time now) {
  std::lock_guard lock(mutex_);
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

bool ExpertMetrics::HasSharedExpert(const BlockExpertStats& block) const {
  const auto layer = static_cast<size_t>(block.layer);
  return block.block == BlockKind::kFeedForward && layer < has_shared_expert_.size() &&
         has_shared_expert_[layer];
}

void ExpertMetrics::Write(PrometheusText& text, const ExpertStats& stats,
                          const std::string& model) const {
  std::lock_guard lock(mutex_);
  if (options_.mode == MoeMetricsMode::kOff) return;
  struct Labels {
    std::string layer;
    const char* block;
  };
  std::vector<Labels> labels;
  for (const BlockExpertStats& block : stats.blocks) {
    labels.push_back({std::to_string(block.layer), Name(block.block)});
  }
  const auto each_block = [&](auto&& write) {
    for (size_t b = 0; b < window_.size(); ++b) write(b, stats.blocks[b], labels[b]);
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
                 {"shared_experts", HasSharedExpert(block) ? "1" : "0"},
                 {"mode", Name(options_.mode)}},
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
  if (options_.mode == MoeMetricsMode::kFull) {
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
  if (options_.weights) {
    text.Family("moe_expert_weight_total", "counter",
                "Sum of the gate weights that rows gave the expert.");
    each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
      for (size_t e = 0; e < block.weight_sums.size(); ++e) {
        text.Sample({{"model", model},
                     {"layer", l.layer},
                     {"block", l.block},
                     {"expert", std::to_string(e)}},
                    block.weight_sums[e]);
      }
    });
  }
  text.Family(
      "moe_recomputed_tokens_total", "counter",
      "Tokens run again after a preemption; only the families of steps count them as well.");
  each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                block.recomputed_tokens);
  });
  text.Family("moe_router_nonfinite_total", "counter", "Rows with NaN or Inf in router scores.");
  each_block([&](size_t, const BlockExpertStats& block, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}}, block.nonfinite_rows);
  });

  const auto write_steps = [&](const char* name, const char* help, const auto& histograms) {
    text.Family(name, "histogram", help);
    for (int p = 0; p < kNumPhases; ++p) {
      const std::span<const uint64_t> counts = histograms[p].buckets;
      const std::span<const double> bounds(kPowersOfTwo.data(), counts.size() - 1);
      text.HistogramSamples({{"model", model}, {"phase", kPhases[p]}}, bounds, counts,
                            static_cast<double>(histograms[p].sum));
    }
  };
  write_steps("moe_expert_tokens_per_step",
              "Rows of an expert in a step, of every expert that had any.", stats.expert_rows);
  write_steps("moe_active_experts_per_step",
              "Experts that had rows in a step, of every routed block.", stats.active_experts);

  text.Family("moe_layer_load_balance_ratio", "gauge", "Mean over maximum load of the experts.");
  each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                MeasureBalance(window_[b]).balance);
  });
  text.Family("moe_layer_load_entropy_ratio", "gauge", "Entropy of the load over its maximum.");
  each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                MeasureBalance(window_[b]).entropy);
  });
  text.Family("moe_layer_unused_experts", "gauge", "Experts that no row chose in the window.");
  each_block([&](size_t b, const BlockExpertStats&, const Labels& l) {
    text.Sample({{"model", model}, {"layer", l.layer}, {"block", l.block}},
                static_cast<double>(MeasureBalance(window_[b]).unused));
  });
  text.Family("moe_window_tokens", "gauge", "Tokens in the decaying window of the load gauges.");
  text.Sample({{"model", model}}, window_tokens_);

  if (options_.mode == MoeMetricsMode::kTop) {
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

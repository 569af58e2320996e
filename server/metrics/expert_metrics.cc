#include "server/metrics/expert_metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>
#include <type_traits>
#include <variant>

#include "base/check.h"
#include "base/error_text.h"
#include "base/kinds.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/statistic_list.h"

namespace moeserve::server {
namespace {

constexpr MoeMetricsMode kModes[] = {MoeMetricsMode::kOff, MoeMetricsMode::kLayer,
                                     MoeMetricsMode::kTop, MoeMetricsMode::kFull,
                                     MoeMetricsMode::kAuto};

// Bucket bounds of the histograms of values per step.
constexpr std::array kPowersOfTwo = {1.,   2.,   4.,   8.,    16.,   32.,   64.,
                                     128., 256., 512., 1024., 2048., 4096., 8192.};

constexpr const char* kPhases[kNumPhases] = {"prefill", "decode"};

// Returns the label of a phase. The engine counts the rows of an encoder, which has no other phase,
// as those of prompts.
std::string_view PhaseLabel(std::string_view phase, bool encoder) {
  return encoder && phase == kPhases[0] ? "encode" : phase;
}

// Writes families that have one sample per routed block, or one sample per routed block and entry
// of a list.
class BlockFamilies {
 public:
  BlockFamilies(PrometheusText& text, const ExpertStats& stats, const std::string& model)
      : text_(text), stats_(stats), model_(model) {}

  // Writes a family. The sample of block number b is value(b, block).
  template <typename Value>
  void PerBlock(const char* name, const char* type, const char* help, const Value& value) {
    text_.Family(name, type, help);
    for (size_t b = 0; b < stats_.blocks.size(); ++b) {
      const BlockExpertStats& block = stats_.blocks[b];
      const std::string layer = std::to_string(block.layer);
      text_.Sample({{"model", model_}, {"layer", layer}, {"block", Name(block.block)}},
                   value(b, block));
    }
  }

  // Writes a family. The samples of block number b are the list values(b, block). The label `label`
  // of entry i is label_of(i).
  template <typename Values, typename LabelOf>
  void PerEntry(const char* name, const char* type, const char* help, const char* label,
                const LabelOf& label_of, const Values& values) {
    text_.Family(name, type, help);
    for (size_t b = 0; b < stats_.blocks.size(); ++b) {
      const BlockExpertStats& block = stats_.blocks[b];
      const std::string layer = std::to_string(block.layer);
      size_t entry = 0;
      for (const auto& value : values(b, block)) {
        const std::string of_entry = label_of(entry++);
        text_.Sample(
            {{"model", model_}, {"layer", layer}, {"block", Name(block.block)}, {label, of_entry}},
            value);
      }
    }
  }

 private:
  PrometheusText& text_;
  const ExpertStats& stats_;
  const std::string& model_;
};

std::string Number(size_t entry) { return std::to_string(entry); }
std::string Rank(size_t entry) { return std::to_string(entry + 1); }

bool Exported(MetricDetail detail, const MoeMetricsOptions& options) {
  switch (detail) {
    case MetricDetail::kAlways:
      return true;
    case MetricDetail::kExperts:
      return options.mode == MoeMetricsMode::kFull;
    case MetricDetail::kWeights:
      return options.weights;
  }
  return false;
}

// Returns `value` in one of the types that PrometheusText writes.
template <typename T>
auto SampleValue(T value) {
  if constexpr (std::is_same_v<T, uint64_t>) {
    return value;
  } else {
    return static_cast<double>(value);
  }
}

// Writes the samples of `statistic`, an entry of BlockStatistics(), for one routed block.
void WriteStatistic(PrometheusText& text, const BlockStatistic& statistic,
                    const BlockExpertStats& block, const std::string& model, bool encoder) {
  const std::string layer = std::to_string(block.layer);
  const char* const kind = Name(block.block);
  const auto write = [&](const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_arithmetic_v<Value>) {
      if (statistic.metric.phase == nullptr) {
        text.Sample({{"model", model}, {"layer", layer}, {"block", kind}}, SampleValue(value));
      } else {
        text.Sample({{"model", model},
                     {"layer", layer},
                     {"block", kind},
                     {"phase", PhaseLabel(statistic.metric.phase, encoder)}},
                    SampleValue(value));
      }
    } else if constexpr (!std::is_same_v<Value, std::string>) {
      for (size_t e = 0; e < value.size(); ++e) {
        const std::string expert = Number(e);
        text.Sample({{"model", model}, {"layer", layer}, {"block", kind}, {"expert", expert}},
                    SampleValue(value[e]));
      }
    } else {
      MOESERVE_CHECK(false, "an exported statistic is a number or a list of numbers per expert");
    }
  };
  std::visit(write, statistic.value(block, {}));
}

// Writes the families of BlockStatistics() that `options` select.
void WriteCounters(PrometheusText& text, const ExpertStats& stats, const std::string& model,
                   const MoeMetricsOptions& options, bool encoder) {
  const std::span<const BlockStatistic> list = BlockStatistics();
  for (size_t begin = 0, end = 0; begin < list.size(); begin = end) {
    const StatisticMetric& metric = list[begin].metric;
    end = begin + 1;
    if (metric.family == nullptr || !Exported(metric.detail, options)) continue;
    const std::string_view family = metric.family;
    while (end < list.size() && list[end].metric.family != nullptr &&
           list[end].metric.family == family) {
      ++end;
    }
    text.Family(family, metric.type, metric.help);
    for (const BlockExpertStats& block : stats.blocks) {
      for (size_t i = begin; i < end; ++i) WriteStatistic(text, list[i], block, model, encoder);
    }
  }
}

void WriteSteps(PrometheusText& text, const ExpertStats& stats, const std::string& model,
                bool encoder) {
  const auto write = [&](const char* name, const char* help, const auto& histograms) {
    text.Family(name, "histogram", help);
    for (int p = 0; p < kNumPhases; ++p) {
      const std::span<const uint64_t> counts = histograms[p].buckets;
      const std::span<const double> bounds(kPowersOfTwo.data(), counts.size() - 1);
      text.HistogramSamples({{"model", model}, {"phase", PhaseLabel(kPhases[p], encoder)}}, bounds,
                            counts, static_cast<double>(histograms[p].sum));
    }
  };
  write("moe_expert_tokens_per_step", "Rows of an expert in a step, of every expert that had any.",
        stats.expert_rows);
  write("moe_active_experts_per_step", "Experts that had rows in a step, of every routed block.",
        stats.active_experts);
}

// Returns the ids of up to 4 experts with the largest counts, largest first; experts with equal
// counts are in order of id.
std::vector<size_t> HottestExperts(const std::vector<double>& counts) {
  constexpr size_t kRanks = 4;
  std::vector<size_t> order(counts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const size_t ranks = std::min(kRanks, order.size());
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(ranks), order.end(),
      [&](size_t x, size_t y) { return counts[x] != counts[y] ? counts[x] > counts[y] : x < y; });
  order.resize(ranks);
  return order;
}

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

Result<MoeMetricsOptions> ResolveMoeMetrics(MoeMetricsOptions options,
                                            const std::vector<ExpertStats>& stacks) {
  size_t experts = 0;
  for (const ExpertStats& stats : stacks) {
    for (const BlockExpertStats& block : stats.blocks) experts += block.selections.size();
  }
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
    : options_(options),
      encoder_(spec.kind == ModelKind::kEncoder || spec.stack == Stack::kEncoder) {
  has_shared_expert_.resize(static_cast<size_t>(spec.num_layers()));
  for (const BlockSpec& block : spec.blocks) {
    const FeedForwardSpec* f = block.feed_forward();
    if (f != nullptr) has_shared_expert_[static_cast<size_t>(block.layer)] = f->shared_width > 0;
  }
}

void ExpertMetrics::Observe(const ExpertStats& stats, absl::Time now) {
  MutexLock lock(mutex_);
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
      // Snapshots from two threads can arrive out of order. An older snapshot must add nothing.
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
  MutexLock lock(mutex_);
  if (options_.mode == MoeMetricsMode::kOff) return;
  if (stats.stack != Stack::kOnly) text.SetStack(KindName(stats.stack));
  text.Family("moe_info", "gauge", "The routed blocks of the model.");
  for (const BlockExpertStats& block : stats.blocks) {
    text.Sample({{"model", model},
                 {"layer", std::to_string(block.layer)},
                 {"block", Name(block.block)},
                 {"experts", std::to_string(block.num_experts)},
                 {"select", std::string(KindName(block.select))},
                 {"top_k", std::to_string(block.max_selected)},
                 {"split_heads", std::to_string(block.split_heads)},
                 {"shared_experts", HasSharedExpert(block) ? "1" : "0"},
                 {"mode", Name(options_.mode)}},
                1.0);
  }
  WriteCounters(text, stats, model, options_, encoder_);
  WriteSteps(text, stats, model, encoder_);
  WriteWindow(text, stats, model, window_, window_tokens_);
  text.Family("moe_activation_ratio", "gauge", "Share of experts that were chosen at all.");
  text.Sample({{"model", model}}, ActivationRatio(stats, 0.0));
  text.Family("moe_activated_parameters_per_token", "gauge", "Mean parameters a token used.");
  text.Sample({{"model", model}}, MeanActivatedParameters(stats));
  text.SetStack("");
}

void ExpertMetrics::WriteWindow(PrometheusText& text, const ExpertStats& stats,
                                const std::string& model, const Window& window,
                                double tokens) const {
  using Block = BlockExpertStats;
  BlockFamilies families(text, stats, model);
  families.PerBlock("moe_layer_load_balance_ratio", "gauge",
                    "Mean over maximum load of the experts.",
                    [&](size_t b, const Block&) { return MeasureLoad(window[b]).balance; });
  families.PerBlock("moe_layer_load_entropy_ratio", "gauge",
                    "Entropy of the load over its maximum.",
                    [&](size_t b, const Block&) { return MeasureLoad(window[b]).entropy; });
  families.PerBlock(
      "moe_layer_unused_experts", "gauge", "Experts that no row chose in the window.",
      [&](size_t b, const Block&) { return static_cast<double>(MeasureLoad(window[b]).unused); });
  text.Family("moe_window_tokens", "gauge", "Tokens in the decaying window of the load gauges.");
  text.Sample({{"model", model}}, tokens);
  if (options_.mode != MoeMetricsMode::kTop) return;

  // One series per expert would be too many: export only the most used experts of each block.
  std::vector<std::vector<size_t>> hottest;
  for (const std::vector<double>& counts : window) hottest.push_back(HottestExperts(counts));
  families.PerEntry("moe_hot_expert_share_ratio", "gauge", "Share of the most used experts.",
                    "rank", Rank, [&](size_t b, const Block&) {
                      const std::vector<double>& counts = window[b];
                      const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
                      std::vector<double> shares;
                      for (const size_t e : hottest[b]) {
                        shares.push_back(total > 0.0 ? counts[e] / total : 0.0);
                      }
                      return shares;
                    });
  families.PerEntry("moe_hot_expert_id", "gauge", "Numbers of the most used experts.", "rank", Rank,
                    [&](size_t b, const Block&) {
                      return std::vector<double>(hottest[b].begin(), hottest[b].end());
                    });
}

}  // namespace moeserve::server

// The Prometheus families of the experts, within bounds on the number of series.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "server/metrics/prometheus.h"

namespace moeserve::server {

// How much is exported: nothing, series for each routed block, also those of the most used experts
// of each, or a series for each expert instead.
enum class MoeMetricsMode : uint8_t { kOff, kLayer, kTop, kFull, kAuto };

struct MoeMetricsOptions {
  // kAuto: kFull up to kMaxAutoSeries experts in all blocks together, else kTop.
  MoeMetricsMode mode = MoeMetricsMode::kAuto;
  bool weights = false;  // with kFull, also the sum of gate weights of each expert

  static constexpr size_t kMaxAutoSeries = 4096;
  static constexpr size_t kMaxSeries = 16384;
};

// "off", "layer", "top", "full" or "auto".
const char* Name(MoeMetricsMode mode);
// InvalidArgument for other words.
Result<MoeMetricsMode> ParseMoeMetricsMode(const std::string& word);

// The options with the mode that kAuto comes to for a model with the blocks of `stats`.
// InvalidArgument: more than kMaxSeries series, or weights without kFull.
Result<MoeMetricsOptions> ResolveMoeMetrics(MoeMetricsOptions options, const ExpertStats& stats);

// Writes the families, with a decaying window for the gauges. Thread-safe.
class ExpertMetrics {
 public:
  // `options` as ResolveMoeMetrics gives them; `spec` is of the model whose stats will come.
  ExpertMetrics(const MoeMetricsOptions& options, const ModelSpec& spec);

  // Moves the window on; to be called about once a second, and before Write.
  void Observe(const ExpertStats& stats, absl::Time now);
  // The window is that of the last Observe.
  void Write(PrometheusText& text, const ExpertStats& stats, const std::string& model) const;

 private:
  bool HasSharedExpert(const BlockExpertStats& block) const;

  const MoeMetricsOptions options_;
  std::vector<bool> has_shared_expert_;  // [layer] in its feed-forward part

  mutable std::mutex mutex_;
  std::vector<std::vector<double>> window_;  // [block][expert]
  std::vector<std::vector<uint64_t>> seen_;  // counters at the last call
  double window_tokens_ = 0.0;
  uint64_t seen_tokens_ = 0;
  absl::Time last_ = absl::InfinitePast();
};

}  // namespace moeserve::server

// The Prometheus families of the experts, with a limit on the number of series.
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

// What is exported: nothing; series per routed block; also of its most used experts; or a series
// per expert instead of these.
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

// Resolves kAuto for a model with the blocks of `stats`.
// InvalidArgument: more than kMaxSeries series, or weights without kFull.
Result<MoeMetricsOptions> ResolveMoeMetrics(MoeMetricsOptions options, const ExpertStats& stats);

// Writes the families. Gauges are of a decaying window. Thread-safe.
class ExpertMetrics {
 public:
  // `options` are resolved by ResolveMoeMetrics; `spec` is that of the model observed.
  ExpertMetrics(const MoeMetricsOptions& options, const ModelSpec& spec);

  // Advances the window; call about once a second, and before Write.
  void Observe(const ExpertStats& stats, absl::Time now);
  // Uses the window of the last Observe.
  void Write(PrometheusText& text, const ExpertStats& stats, const std::string& model) const;

 private:
  bool HasSharedExpert(const BlockExpertStats& block) const;
  // Writes the gauges of the window. Requires mutex_.
  void WriteWindow(PrometheusText& text, const ExpertStats& stats, const std::string& model) const;

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

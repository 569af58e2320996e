// Prometheus metrics about experts, with a limit on the number of series.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "server/metrics/prometheus.h"

namespace moeserve::server {

// Which series are exported. kOff: none. kLayer: series per routed block. kTop: also series for the
// most used experts of each block. kFull: series per block and per expert. kAuto: kFull or kTop,
// depending on the number of experts.
enum class MoeMetricsMode : uint8_t { kOff, kLayer, kTop, kFull, kAuto };

struct MoeMetricsOptions {
  // kAuto selects kFull for models with up to kMaxAutoSeries experts in all blocks together, else
  // kTop.
  MoeMetricsMode mode = MoeMetricsMode::kAuto;
  bool weights = false;  // with kFull, also exports the sum of each expert's gate weights

  static constexpr size_t kMaxAutoSeries = 4096;
  static constexpr size_t kMaxSeries = 16384;
};

// Returns "off", "layer", "top", "full" or "auto".
const char* Name(MoeMetricsMode mode);
// Parses the words that Name() returns. InvalidArgument for other words.
Result<MoeMetricsMode> ParseMoeMetricsMode(const std::string& word);

// Resolves kAuto for a model whose routed blocks `stacks` contains. InvalidArgument for `weights`
// without kFull, or if kFull needs more than kMaxSeries series: one per expert, or two with
// `weights`.
Result<MoeMetricsOptions> ResolveMoeMetrics(MoeMetricsOptions options,
                                            const std::vector<ExpertStats>& stacks);

// Writes the metrics. Counters are totals. Gauges are computed from the window: counts that decay
// exponentially with a half-life of one minute. Thread-safe.
class ExpertMetrics {
 public:
  // ResolveMoeMetrics() must have resolved `options`. `spec` is that of the stack whose statistics
  // are observed.
  ExpertMetrics(const MoeMetricsOptions& options, const ModelSpec& spec);

  // Advances the window to `now`. Must be called about once per second, and before Write().
  void Observe(const ExpertStats& stats, absl::Time now);
  // Writes all families, with the label "stack" if the model has two. The gauges use the window of
  // the last Observe().
  void Write(PrometheusText& text, const ExpertStats& stats, const std::string& model) const;

 private:
  using Window = std::vector<std::vector<double>>;  // [block][expert]: selections, decayed

  bool HasSharedExpert(const BlockExpertStats& block) const;
  // Writes the gauges computed from the window and its number of tokens.
  void WriteWindow(PrometheusText& text, const ExpertStats& stats, const std::string& model,
                   const Window& window, double tokens) const;

  const MoeMetricsOptions options_;
  const bool encoder_;                   // whether the stack is an encoder
  std::vector<bool> has_shared_expert_;  // [layer]: whether its feed-forward has a shared expert

  mutable Mutex mutex_;
  Window window_ ABSL_GUARDED_BY(mutex_);
  // [block][expert]: selections so far.
  std::vector<std::vector<uint64_t>> seen_ ABSL_GUARDED_BY(mutex_);
  double window_tokens_ ABSL_GUARDED_BY(mutex_) = 0.0;
  uint64_t seen_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace moeserve::server

// Follows the expert statistics of one stack of a served model: their last minutes and their
// metrics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "server/metrics/expert_metrics.h"
#include "server/metrics/prometheus.h"
#include "server/reports/expert_history.h"
#include "server/reports/stack_experts.h"

namespace moeserve::server {

// Thread-safe.
class ExpertWatch {
 public:
  // ResolveMoeMetrics() must have resolved `options`.
  ExpertWatch(const StackExperts& experts, const MoeMetricsOptions& options)
      : experts_(experts), metrics_(options, experts.spec()) {}

  Stack stack() const { return experts_.stack(); }
  const ExpertHistory& history() const { return history_; }

  // Adds a snapshot to history() and to the decaying counts from which the gauges are computed.
  // Must be called about once per second.
  void Tick();
  // Writes the families about experts. The counters include every request that had ended when the
  // engine had ended `finished` requests; the gauges are those of the last Tick(). `stuck`: the
  // engine must not be called; the newest statistics that are known are written, if there are any.
  void Write(PrometheusText& text, const std::string& model, uint64_t finished, bool stuck);

 private:
  // Returns statistics that are up to a short interval old, but not older than the last end of a
  // request; with `stuck`, the newest that are known, or null.
  std::shared_ptr<const ExpertStats> Recent(uint64_t finished, bool stuck);

  const StackExperts experts_;
  ExpertMetrics metrics_;
  ExpertHistory history_;
  Mutex recent_mutex_;
  std::shared_ptr<const ExpertStats> recent_ ABSL_GUARDED_BY(recent_mutex_);
  absl::Time recent_time_ ABSL_GUARDED_BY(recent_mutex_);
  uint64_t recent_finished_ ABSL_GUARDED_BY(recent_mutex_) = 0;  // EngineStats::finished()
};

}  // namespace moeserve::server

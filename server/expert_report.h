// Expert statistics as people and programs read them: JSON, a table, Prometheus families.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/expert_stats.h"
#include "nlohmann/json.hpp"
#include "server/prometheus.h"

namespace moeserve::server {

// The answer of GET /v1/experts/stats. `window_seconds` absent: since start. `threshold` is that of
// the activation ratio.
nlohmann::ordered_json ExpertStatsJson(const ExpertStats& stats, const std::string& model,
                                       std::optional<double> window_seconds, double threshold);

// One line for each routed block: load, balance, distinct experts; and the totals.
std::string ExpertStatsTable(const ExpertStats& stats, double threshold);

// Mean number of distinct experts that a token touched in a block; 0 without tokens.
double MeanDistinctExperts(const BlockExpertStats& block);

// How evenly `selections` are spread. All zero selections: 1, 1, all experts unused.
struct LoadShape {
  double balance = 1.0;  // mean / max
  double entropy = 1.0;  // of the shares / ln E
  int unused = 0;
};
LoadShape MeasureLoad(const std::vector<double>& selections);

// The Prometheus families, with a decaying window for the gauges. Thread-safe.
class ExpertMetrics {
 public:
  static constexpr size_t kAutoFullSeries = 4096;

  void Write(PrometheusText& text, const ExpertStats& stats, const std::string& model,
             absl::Time now);

 private:
  void Decay(const ExpertStats& stats, absl::Time now);

  std::mutex mutex_;
  std::vector<std::vector<double>> window_;  // [block][expert]
  std::vector<std::vector<uint64_t>> seen_;  // counters at the last call
  double window_tokens_ = 0.0;
  uint64_t seen_tokens_ = 0;
  absl::Time last_ = absl::InfinitePast();
};

}  // namespace moeserve::server

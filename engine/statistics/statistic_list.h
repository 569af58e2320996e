// The list of all expert statistics: names, units, meanings, sources and values.
//
// The JSON report, the gRPC message, the table in README.md and most Prometheus families of expert
// statistics are built from this list; StatisticMetric names the other families. A new statistic
// needs an entry here, and a field in the proto file if gRPC is to report it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

using StatisticValue = std::variant<uint64_t, int64_t, double, std::string, std::vector<uint64_t>,
                                    std::vector<int64_t>, std::vector<double>>;

struct StatisticOptions {
  double threshold = 0.0;  // selections per token above which an expert counts as activated
};

// When a Prometheus family is exported: always, only with per-expert series, or only with the
// experts' weights (--moe-metrics, --moe-expert-weights).
enum class MetricDetail : uint8_t { kAlways, kExperts, kWeights };

// A Prometheus family with one sample per block, or one per expert if the value is a vector.
// server/metrics exports sliding windows, histograms and values of the whole model without this
// list.
struct StatisticMetric {
  const char* family = nullptr;  // family name without prefix; null: not exported
  const char* help = "";
  // Value of the label `phase`; entries of one family that differ in it are adjacent.
  const char* phase = nullptr;
  MetricDetail detail = MetricDetail::kAlways;
  const char* type = "counter";  // "gauge" if the value can fall
};

// In the texts, T: tokens; h: rows per token; k: largest number of experts per row; E: experts of
// the block.
template <typename Stats>
struct Statistic {
  std::string_view name;   // key in JSON; "a.b" is key b in object a; empty: not in JSON
  std::string_view proto;  // field of the gRPC message; empty: not in the message
  std::string_view unit;   // unit; with [E] if there is one value per expert
  std::string_view meaning;
  std::string_view source;  // paper and equation or figure; empty: not from a paper
  StatisticValue (*value)(const Stats& stats, const StatisticOptions& options);
  StatisticMetric metric = {};
};

using BlockStatistic = Statistic<BlockExpertStats>;
using ModelStatistic = Statistic<ExpertStats>;

// Return the statistics in the order of the reports. Static data.
std::span<const BlockStatistic> BlockStatistics();
std::span<const ModelStatistic> ModelStatistics();

}  // namespace moeserve

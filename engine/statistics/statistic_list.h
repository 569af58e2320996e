// The one list of the statistics of experts: names, units, meanings, sources and values.
//
// The JSON report, the gRPC message, the plain Prometheus families and the table in README.md
// follow from it. A new statistic is an entry here (and a field in the proto file, if gRPC reports
// it).
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
  double threshold = 0.0;  // of selections per token, above which an expert counts as activated
};

// When a family is exported: always, with a series per expert, or with the experts' weights too
// (--moe-metrics, --moe-expert-weights).
enum class MetricDetail : uint8_t { kAlways, kExperts, kWeights };

// A Prometheus counter with one sample for each block, or of each expert where the value is a
// vector. Windows, histograms and values of the model are not in the list (server/metrics).
struct StatisticMetric {
  const char* family = nullptr;  // without prefix; null: not exported
  const char* help = "";
  const char* phase = nullptr;  // a label; entries of one family that differ in it are adjacent
  MetricDetail detail = MetricDetail::kAlways;
};

// T: tokens; h: rows of a token; k: most experts of a row; E: experts of the block.
template <typename Stats>
struct Statistic {
  std::string_view name;   // key in JSON; "a.b" is key b of object a; empty: not in JSON
  std::string_view proto;  // field of the gRPC message; empty: not there
  std::string_view unit;   // with [E] for one value per expert
  std::string_view meaning;
  std::string_view source;  // paper and place; empty: ours
  StatisticValue (*value)(const Stats& stats, const StatisticOptions& options);
  StatisticMetric metric = {};
};

using BlockStatistic = Statistic<BlockExpertStats>;
using ModelStatistic = Statistic<ExpertStats>;

// In the order of the reports. Static data.
std::span<const BlockStatistic> BlockStatistics();
std::span<const ModelStatistic> ModelStatistics();

}  // namespace moeserve

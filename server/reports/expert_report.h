// Expert statistics as JSON and as a table.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/statistics/expert_stats.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

// Returns the answer of GET /v1/experts/stats. `window_seconds` absent: since start. `threshold` is
// that of the activation ratio.
nlohmann::ordered_json ExpertStatsJson(const ExpertStats& stats, const std::string& model,
                                       std::optional<double> window_seconds, double threshold);

// Returns one line per routed block (rows, balance, distinct experts) and the totals.
std::string ExpertStatsTable(const ExpertStats& stats, double threshold);

}  // namespace moeserve::server

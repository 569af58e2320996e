// Entries of the list of statistics as JSON.
#pragma once

#include <span>

#include "engine/statistics/statistic_list.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

// Adds the entries that have a name in JSON, in the order of the list.
void AddStatistics(nlohmann::ordered_json& to, std::span<const BlockStatistic> list,
                   const BlockExpertStats& block, const StatisticOptions& options);
void AddStatistics(nlohmann::ordered_json& to, std::span<const ModelStatistic> list,
                   const ExpertStats& stats, const StatisticOptions& options);

}  // namespace moeserve::server

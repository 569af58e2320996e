// Writes entries of the list of statistics (engine/statistics/statistic_list.h) as JSON.
#pragma once

#include <span>

#include "engine/statistics/statistic_list.h"
#include "server/base/json.h"

namespace moeserve::server {

// Adds the values of the statistics that have a JSON name to the object `to`, in the order of
// `list`.
void AddStatistics(OrderedJson& to, std::span<const BlockStatistic> list,
                   const BlockExpertStats& block, const StatisticOptions& options);
void AddStatistics(OrderedJson& to, std::span<const ModelStatistic> list, const ExpertStats& stats,
                   const StatisticOptions& options);

}  // namespace moeserve::server

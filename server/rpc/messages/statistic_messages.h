// Writes entries of the list of statistics (engine/statistics/statistic_list.h) to fields of gRPC
// messages.
#pragma once

#include <span>

#include "engine/statistics/statistic_list.h"
#include "google/protobuf/message.h"

namespace moeserve::server {

// Sets, for each statistic in `list` that names a field of gRPC messages, that field of `to` to the
// value of the statistic. Stops the process if `to` has no field of that name or if the field has
// another type than the value.
void SetStatistics(google::protobuf::Message& to, std::span<const BlockStatistic> list,
                   const BlockExpertStats& block, const StatisticOptions& options);
void SetStatistics(google::protobuf::Message& to, std::span<const ModelStatistic> list,
                   const ExpertStats& stats, const StatisticOptions& options);

}  // namespace moeserve::server

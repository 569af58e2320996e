// Writes entries of the list of statistics (engine/statistics/statistic_list.h) to fields of gRPC
// messages.
#pragma once

#include <span>

#include "engine/statistics/statistic_list.h"
#include "google/protobuf/message.h"

namespace moeserve::server {

// Sets the fields of `to` to the values of the statistics in `list`, which contain the names of the
// fields. If `to` lacks such a field, or if its type differs from the value's, the process stops.
void SetStatistics(google::protobuf::Message& to, std::span<const BlockStatistic> list,
                   const BlockExpertStats& block, const StatisticOptions& options);
void SetStatistics(google::protobuf::Message& to, std::span<const ModelStatistic> list,
                   const ExpertStats& stats, const StatisticOptions& options);

}  // namespace moeserve::server

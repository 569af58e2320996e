// Entries of the list of statistics as fields of gRPC messages.
#pragma once

#include <span>

#include "engine/statistics/statistic_list.h"
#include "google/protobuf/message.h"

namespace moeserve::server {

// Sets the fields of `to` that the list names. A field that the message lacks, or whose type
// differs from the value's, is a broken invariant and stops the process.
void SetStatistics(google::protobuf::Message& to, std::span<const BlockStatistic> list,
                   const BlockExpertStats& block, const StatisticOptions& options);
void SetStatistics(google::protobuf::Message& to, std::span<const ModelStatistic> list,
                   const ExpertStats& stats, const StatisticOptions& options);

}  // namespace moeserve::server

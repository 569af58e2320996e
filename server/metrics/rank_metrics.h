// The metrics of a model that several ranks compute.
#pragma once

#include <string>
#include <vector>

#include "kernels/exchange/exchange.h"
#include "server/metrics/prometheus.h"

namespace moeserve::server {

// What the leader knows of the ranks. One rank, with no exchange, is a process alone.
struct RankStatus {
  struct Rank {
    std::string host;
    bool up = true;
  };
  std::vector<Rank> ranks;
  ExchangeCounts exchange;  // of the leader
};

// Writes the families about ranks, which exist without ranks, too.
void WriteRankMetrics(PrometheusText& text, const RankStatus& status);

}  // namespace moeserve::server

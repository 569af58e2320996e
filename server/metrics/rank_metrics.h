// The metrics of a model that several ranks compute.
#pragma once

#include <cstdint>
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
  // LoadWatch::imbalance(), the version of the placement of experts that steps use, and the bytes
  // of experts that ranks have loaded to move them; all 0 without ranks.
  double expert_imbalance = 0.0;
  uint32_t placement_version = 0;
  int64_t moved_bytes = 0;
};

// Writes the families about ranks, which exist without ranks, too.
void WriteRankMetrics(PrometheusText& text, const RankStatus& status);

}  // namespace moeserve::server

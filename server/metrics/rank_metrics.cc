#include "server/metrics/rank_metrics.h"

#include <string>
#include <vector>

namespace moeserve::server {

void WriteRankMetrics(PrometheusText& text, const RankStatus& status) {
  const ExchangeCounts& exchange = status.exchange;
  std::vector<RankStatus::Rank> ranks = status.ranks;
  if (ranks.empty()) ranks.emplace_back();  // this process
  text.Single("ranks", "gauge", "Processes that compute the model together.",
              static_cast<double>(ranks.size()));
  text.Family("rank_up", "gauge", "1 unless the process was lost.");
  for (size_t r = 0; r < ranks.size(); ++r) {
    text.Sample({{"rank", std::to_string(r)}, {"host", ranks[r].host}}, ranks[r].up ? 1.0 : 0.0);
  }
  text.Family("exchange_bytes_total", "counter", "Bytes that rank 0 has sent to others.");
  constexpr const char* kKinds[kExchangeKinds] = {"gather", "broadcast", "gather_at_leader",
                                                  "all_to_all"};
  for (size_t kind = 0; kind < kExchangeKinds; ++kind) {
    text.Sample({{"kind", kKinds[kind]}}, exchange.sent_by[kind]);
  }
  text.Family("exchange_seconds", "histogram",
              "Time of rank 0 from the start of a gather or all-to-all to its end, with what it "
              "computed meanwhile.");
  text.HistogramSamples({}, kGatherSecondsBounds, exchange.gather_times, exchange.gather_seconds);
  text.Family("rank_wait_seconds_total", "counter",
              "Time that rank 0 waited in gathers and all-to-alls until the part of this rank had "
              "arrived.");
  for (size_t r = 0; r < ranks.size(); ++r) {
    const double wait = r < exchange.wait_seconds.size() ? exchange.wait_seconds[r] : 0.0;
    text.Sample({{"rank", std::to_string(r)}}, wait);
  }
  text.Single(
      "expert_imbalance", "gauge",
      "Cost of the experts of the most loaded rank / mean of all ranks, in the recent steps "
      "of a routed layer, mean of the layers; 0 without ranks.",
      status.expert_imbalance);
  text.Single("placement_version", "gauge",
              "Placement of experts on ranks that steps use: 1 at the start, one more after each "
              "move of experts; 0 without ranks.",
              status.placement_version);
  text.Single("placement_moved_bytes_total", "counter",
              "Bytes of experts that ranks have loaded because they were moved to them.",
              static_cast<double>(status.moved_bytes));
}

}  // namespace moeserve::server

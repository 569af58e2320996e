#include "server/metrics/rank_metrics.h"

#include <algorithm>

namespace moeserve::server {

void WriteRankMetrics(PrometheusText& text, const RankStatus& status) {
  const ExchangeCounts& exchange = status.exchange;
  text.Single("ranks", "gauge", "Processes that compute the model together.",
              static_cast<double>(std::max<size_t>(status.ranks.size(), 1)));
  text.Family("rank_up", "gauge", "1 unless the process was lost.");
  for (size_t r = 0; r < status.ranks.size(); ++r) {
    text.Sample({{"rank", std::to_string(r)}, {"host", status.ranks[r].host}},
                status.ranks[r].up ? 1.0 : 0.0);
  }
  text.Family("exchange_bytes_total", "counter", "Bytes that rank 0 has sent to others.");
  constexpr const char* kKinds[kExchangeKinds] = {"gather", "broadcast", "gather_at_leader"};
  for (size_t kind = 0; kind < kExchangeKinds; ++kind) {
    text.Sample({{"kind", kKinds[kind]}}, exchange.sent_by[kind]);
  }
  text.Family("exchange_seconds", "histogram",
              "Time of rank 0 from the start of a gather to its end, with what it computed "
              "meanwhile.");
  text.HistogramSamples({}, kGatherSecondsBounds, exchange.gather_times, exchange.gather_seconds);
  text.Family("rank_wait_seconds_total", "counter",
              "Time that rank 0 waited in gathers until the part of this rank had arrived.");
  for (size_t r = 1; r < std::min(exchange.wait_seconds.size(), status.ranks.size()); ++r) {
    text.Sample({{"rank", std::to_string(r)}}, exchange.wait_seconds[r]);
  }
}

}  // namespace moeserve::server

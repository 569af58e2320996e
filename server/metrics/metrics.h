// The counters and histograms of the whole server, and their text at /metrics.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "base/mutex.h"
#include "engine/engine.h"
#include "server/base/memory_budget.h"
#include "server/metrics/prometheus.h"

namespace moeserve::server {

// Reasons for which the server refuses a request. The engine counts its own refusals.
enum class Rejection { kInvalid, kDraining, kQueueFull };

// Thread-safe.
class Metrics {
 public:
  Metrics();

  std::atomic<int64_t> http_connections{0};
  std::atomic<int64_t> grpc_connections{0};
  // gRPC connections closed because of what their client sent, or for the memory of its calls.
  std::atomic<uint64_t> grpc_dropped{0};
  // New connections beyond a limit on their number: each was refused, or replaced another one.
  struct OverLimit {
    std::atomic<uint64_t> server{0};   // beyond the limit on all connections of the port
    std::atomic<uint64_t> address{0};  // beyond the limit on those of one client address
  };
  OverLimit http_over_limit;
  OverLimit grpc_over_limit;
  std::atomic<uint64_t> ignored_fields{0};

  // Creates the series of the given labels with value 0. If a series appeared with its first event
  // only, an alert on the counter's increase would miss that event.
  void DeclareHttp(std::string_view endpoint, std::string_view method);
  void DeclareGrpc(std::string_view method);

  // `endpoint` is a route pattern or "other". `method` is one of a fixed set of names.
  void CountHttp(std::string_view endpoint, std::string_view method, int code, double seconds);
  void CountGrpc(std::string_view method, std::string_view code, double seconds);
  void CountRejected(Rejection reason);

  using HttpKey = std::tuple<std::string, std::string, int>;  // endpoint, method, code
  std::map<HttpKey, uint64_t> HttpRequests() const;

  // Writes the families that do not depend on the engines.
  void WriteServer(PrometheusText& text) const;
  // Adds what the engines have refused: because their queues were full, and because a request has
  // waited for too long.
  void WriteRejected(PrometheusText& text, uint64_t queue_full, uint64_t queue_timeout) const;

 private:
  mutable Mutex mutex_;
  std::map<HttpKey, uint64_t> http_requests_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, std::string>, uint64_t> grpc_requests_ ABSL_GUARDED_BY(mutex_);
  Histogram http_duration_;
  Histogram grpc_duration_;
  std::array<std::atomic<uint64_t>, 3> rejected_{};
};

// Writes the families about the memory that requests hold.
void WriteMemoryMetrics(PrometheusText& text, const MemoryBudget& memory);
// Writes the families about one engine's steps, queue and caches.
void WriteEngineMetrics(PrometheusText& text, const EngineStats& stats);
// Writes the standard process_* families.
void WriteProcessMetrics(PrometheusText& text);

}  // namespace moeserve::server

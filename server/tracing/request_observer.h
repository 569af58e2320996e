// Watches requests from their arrival to their end: writes the log line of each, and exports the
// spans of those that are sampled.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "server/metrics/prometheus.h"
#include "server/tracing/request_record.h"
#include "server/tracing/span_exporter.h"

namespace moeserve::server {

enum class AccessLog {
  kOff,
  kOn,  // without health checks and /metrics, if they succeed
  kAll,
};

struct RequestObserverOptions {
  AccessLog access_log = AccessLog::kOn;
  double sample_ratio = 1.0;  // of the traces that start here
  // What the spans say about the server.
  SpanResource resource;
  std::optional<SpanExporterOptions> exporter;  // nullopt: no spans
};

// How a request ended.
struct RequestEnd {
  int status = 0;              // of HTTP, or the number of gRPC's code
  std::string_view code;       // the name of gRPC's code; empty for HTTP
  std::string_view method;     // one of a fixed set of names, for the log
  std::string_view route;      // the pattern that the path matches; empty for gRPC
  std::string_view key;        // the name of the request's key; empty if there is none
  bool for_operators = false;  // a health check or /metrics
  bool failed = false;         // by the server's fault
  int64_t request_bytes = -1;  // of the bodies; -1: unknown
  int64_t response_bytes = -1;
};

// Thread-safe.
class RequestObserver {
 public:
  explicit RequestObserver(RequestObserverOptions options = {});

  // `traceparent` and `tracestate` are the client's headers, empty if there are none; hostile.
  std::shared_ptr<RequestRecord> Begin(RequestStart start, std::string_view traceparent,
                                       std::string_view tracestate = {}) const;
  // Must be called once for each record.
  void End(const RequestRecord& record, const RequestEnd& end);

  // Waits until the spans have been exported, at most for `timeout`.
  void Flush(std::chrono::milliseconds timeout);

  // Writes the families about spans.
  void WriteMetrics(PrometheusText& text) const;

 private:
  const RequestObserverOptions options_;
  std::unique_ptr<SpanExporter> exporter_;  // null: no spans
};

}  // namespace moeserve::server

// Sends spans to a collector, by OTLP over HTTP in JSON, on a thread of its own.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "server/tracing/otlp_options.h"
#include "server/tracing/span.h"

namespace moeserve::server {

struct SpanExporterOptions {
  OtlpEndpoint endpoint;
  HttpHeaders headers;
  size_t max_queued = 4096;                     // spans; further ones are dropped
  size_t max_batch = 512;                       // spans of one request to the collector
  std::chrono::milliseconds delay{1000};        // at most so long a span waits for a fuller batch
  std::chrono::milliseconds timeout{10'000};    // of one request
  std::chrono::milliseconds retry_delay{1000};  // before the second try; then it doubles
  std::chrono::milliseconds max_retry_delay{30'000};
  int max_tries = 5;
};

// Thread-safe. A batch is tried again if the collector cannot be reached or answers 429, 502, 503
// or 504, after its Retry-After if it has one. All other failures, and the last one, drop the
// batch.
class SpanExporter {
 public:
  SpanExporter(SpanExporterOptions options, SpanResource resource);
  // Ends the request that is under way and drops what waits. Waits for the thread, so that it does
  // not run while the process ends; but for at most two seconds if the system's resolver blocks.
  ~SpanExporter();
  SpanExporter(const SpanExporter&) = delete;
  SpanExporter& operator=(const SpanExporter&) = delete;

  // Does not block. If there is no room for all of `spans`, drops and counts them.
  void Add(std::vector<Span> spans);

  // Sends what waits, without waiting for a fuller batch. Returns whether all spans had been
  // exported or dropped before `timeout`.
  bool Flush(std::chrono::milliseconds timeout);

  uint64_t exported() const;  // spans that the collector has accepted
  uint64_t dropped() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive the exporter
  std::thread thread_;
};

}  // namespace moeserve::server

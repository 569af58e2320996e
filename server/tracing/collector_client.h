// The HTTP client of the span exporter.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>

#include "server/tracing/span_exporter.h"

namespace moeserve::server {

struct CollectorAnswer {
  int status = 0;     // 0: there was no answer
  std::string error;  // why there was no answer
  std::optional<std::chrono::milliseconds> retry_after;
  uint64_t rejected_spans = 0;  // OTLP's partial success
};

// Posts JSON over a new connection. Blocks until there is an answer, `timeout` has passed or `stop`
// is requested; longer if the system's resolver does. At most 64 KiB of the answer are read.
CollectorAnswer PostToCollector(const OtlpEndpoint& endpoint, const HttpHeaders& headers,
                                const std::string& body, std::chrono::milliseconds timeout,
                                const std::stop_token& stop);

}  // namespace moeserve::server

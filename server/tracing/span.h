// Spans in the JSON of the OpenTelemetry protocol (OTLP).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "server/base/json.h"

namespace moeserve::server {

enum class SpanKind { kInternal = 1, kServer = 2 };  // as OTLP numbers them

struct Span {
  using Value = std::variant<std::string, int64_t, double, std::vector<std::string>>;

  std::string trace_id;
  std::string span_id;
  std::string parent_id;  // may be empty
  std::string state;      // of W3C's `tracestate`; may be empty
  std::string name;
  SpanKind kind = SpanKind::kInternal;
  absl::Time start;  // wall clock
  absl::Time end;
  bool failed = false;
  std::vector<std::pair<std::string, Value>> attributes;
};

// What all spans of a process have in common.
struct SpanResource {
  std::string service_name = "moeserve";
  std::string service_version;
  std::string instance_id;  // unique among the instances of the service
};

// Returns the body of a request to a collector. Strings may contain any bytes.
std::string ExportRequestJson(const SpanResource& resource, const std::vector<Span>& spans);

}  // namespace moeserve::server

// The place of a request in a distributed trace, after the W3C recommendation "Trace Context".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace moeserve::server {

// What a client says about the trace that its request belongs to.
struct TraceParent {
  std::string trace_id;   // 32 lower-case hexadecimal digits, not all 0
  std::string parent_id;  // 16 of them, not all 0
  bool sampled = false;
};

// Parses a `traceparent` header. Returns nullopt for anything malformed, which the recommendation
// says to ignore. Later versions of the header than 00 may have further parts, which are ignored.
std::optional<TraceParent> ParseTraceParent(std::string_view header);

// Returns a `tracestate` header, the members of which several headers may give, without the empty
// members; nullopt for anything malformed, also beyond 32 members or 512 bytes, which the
// recommendation allows to drop.
std::optional<std::string> ParseTraceState(std::string_view header);

struct TraceContext {
  std::string trace_id;
  std::string span_id;    // of the request
  std::string parent_id;  // empty if the trace starts here
  bool sampled = false;   // whether the request's span is exported
  std::string state;      // the client's `tracestate`; empty if there is none
};

// Returns the `traceparent` header that names the request's span.
std::string TraceParentHeader(const TraceContext& trace);

// Continues the client's trace, with the client's decision about sampling, or starts a new one, of
// which the part `ratio` (0 to 1) is sampled. Thread-safe.
TraceContext StartSpan(const std::optional<TraceParent>& parent, double ratio);

// Returns `digits` random hexadecimal digits that are not all 0. Thread-safe.
std::string RandomHex(int digits);

}  // namespace moeserve::server

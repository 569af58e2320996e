// The headers `traceparent` and `tracestate`, and the options that say where spans are sent.

#include <optional>

#include "server/tracing/otlp_options.h"
#include "server/tracing/trace_context.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  const std::string_view text = testing::Text(data, size);
  if (const auto parent = server::ParseTraceParent(text)) {
    testing::CountAccepted();
    const server::TraceContext context = server::StartSpan(parent, 0.5);
    MOESERVE_CHECK(context.trace_id.size() == 32 && context.parent_id.size() == 16, "sizes of ids");
    // Ids that are written again are read as the same.
    const auto again =
        server::ParseTraceParent("00-" + context.trace_id + "-" + context.parent_id + "-01");
    MOESERVE_CHECK(again.has_value() && again->trace_id == parent->trace_id, "valid ids");
  }
  if (const auto state = server::ParseTraceState(text)) {
    MOESERVE_CHECK(state->size() <= 512, "size of tracestate");
    MOESERVE_CHECK(server::ParseTraceState(*state) == state, "what is kept is well-formed");
  }
  if (const auto endpoint = server::ParseOtlpEndpoint(text); endpoint.ok()) {
    MOESERVE_CHECK(endpoint->port > 0 && endpoint->port < 65536, "ports");
    MOESERVE_CHECK(endpoint->path.find_first_of("\r\n ") == std::string::npos, "one line");
  }
  if (const auto headers = server::ParseOtlpHeaders(text); headers.ok()) {
    for (const auto& [name, value] : *headers) {
      MOESERVE_CHECK(!name.empty() && (name + value).find_first_of("\r\n") == std::string::npos,
                     "one line");
    }
  }
  return 0;
}

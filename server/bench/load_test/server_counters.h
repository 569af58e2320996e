// Counters from the Prometheus metrics of a server, and differences of counters.
#pragma once

#include <optional>
#include <string_view>

namespace moeserve::server {

// A member is absent if the server does not report that counter.
struct ServerCounters {
  std::optional<double> prompt_tokens;
  std::optional<double> generation_tokens;
  std::optional<double> prefix_queried_tokens;
  std::optional<double> prefix_hit_tokens;
  std::optional<double> preemptions;
  std::optional<double> steps;
  std::optional<double> step_seconds;     // spent in steps
  std::optional<double> forward_seconds;  // the part of step_seconds spent in the model
  std::optional<double> rejected;         // requests rejected for any reason
};

// Returns `later` minus `earlier`. A difference is absent if one of its counters is absent, or if
// the counter decreased, because the server was restarted.
ServerCounters Difference(const ServerCounters& later, const ServerCounters& earlier);

// Parses metrics in Prometheus' text format. Sums each counter over its labels. Skips malformed
// lines.
ServerCounters ParseServerCounters(std::string_view text);

}  // namespace moeserve::server

// Counters from a server's metrics, and their differences.
#pragma once

#include <optional>
#include <string_view>

namespace moeserve::server {

// Absent: the server does not report it.
struct ServerCounters {
  std::optional<double> prompt_tokens;
  std::optional<double> generation_tokens;
  std::optional<double> prefix_queried_tokens;
  std::optional<double> prefix_hit_tokens;
  std::optional<double> preemptions;
  std::optional<double> steps;
  std::optional<double> step_seconds;     // spent in steps
  std::optional<double> forward_seconds;  // part of it spent in the model
  std::optional<double> rejected;         // for any reason
};

// Returns `later` minus `earlier`; absent if either is, or if the counter decreased, because the
// server was restarted.
ServerCounters Difference(const ServerCounters& later, const ServerCounters& earlier);

// Parses Prometheus text and sums each counter over its labels. Skips malformed lines.
ServerCounters ParseServerCounters(std::string_view text);

}  // namespace moeserve::server

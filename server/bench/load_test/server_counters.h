// What a server says about itself, for differences between two moments.
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
  std::optional<double> forward_seconds;  // of it, inside the model
  std::optional<double> rejected;         // for any reason
};

// `later` minus `earlier`; absent where either is. A counter that went back (the server was
// restarted in between) is absent too.
ServerCounters Difference(const ServerCounters& later, const ServerCounters& earlier);

// From Prometheus text; a counter's samples are summed over its labels. Lines that are no samples
// are skipped: the text comes from outside.
ServerCounters ParseServerCounters(std::string_view text);

}  // namespace moeserve::server

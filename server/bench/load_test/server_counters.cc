#include "server/bench/load_test/server_counters.h"

#include <charconv>
#include <cmath>

namespace moeserve::server {
namespace {

struct Field {
  std::string_view name;
  std::optional<double> ServerCounters::*value;
};

constexpr Field kFields[] = {
    {"moeserve_prompt_tokens_total", &ServerCounters::prompt_tokens},
    {"moeserve_generation_tokens_total", &ServerCounters::generation_tokens},
    {"moeserve_prefix_cache_queried_tokens_total", &ServerCounters::prefix_queried_tokens},
    {"moeserve_prefix_cache_hit_tokens_total", &ServerCounters::prefix_hit_tokens},
    {"moeserve_preemptions_total", &ServerCounters::preemptions},
    {"moeserve_engine_steps_total", &ServerCounters::steps},
    {"moeserve_engine_step_seconds_total", &ServerCounters::step_seconds},
    {"moeserve_engine_forward_seconds_total", &ServerCounters::forward_seconds},
    {"moeserve_requests_rejected_total", &ServerCounters::rejected},
};

// Returns the value of a sample; `rest` is the text after the metric's name. Label values can
// contain spaces and braces.
std::optional<double> SampleValue(std::string_view rest) {
  if (rest.starts_with('{')) {
    bool quoted = false;
    size_t at = 1;
    for (; at < rest.size() && (quoted || rest[at] != '}'); ++at) {
      if (quoted && rest[at] == '\\') {
        ++at;
      } else if (rest[at] == '"') {
        quoted = !quoted;
      }
    }
    if (at >= rest.size()) return std::nullopt;
    rest.remove_prefix(at + 1);
  }
  const size_t begin = rest.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return std::nullopt;
  rest.remove_prefix(begin);
  double value = 0.0;
  const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (parsed.ec != std::errc() || !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace

ServerCounters Difference(const ServerCounters& later, const ServerCounters& earlier) {
  ServerCounters out;
  for (const Field& field : kFields) {
    const std::optional<double>& a = earlier.*field.value;
    const std::optional<double>& b = later.*field.value;
    if (a && b && *b >= *a) out.*field.value = *b - *a;
  }
  return out;
}

ServerCounters ParseServerCounters(std::string_view text) {
  ServerCounters out;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    for (const Field& field : kFields) {
      if (!line.starts_with(field.name)) continue;
      const std::string_view rest = line.substr(field.name.size());
      if (rest.empty() || (rest[0] != '{' && rest[0] != ' ' && rest[0] != '\t')) continue;
      if (const std::optional<double> value = SampleValue(rest)) {
        std::optional<double>& sum = out.*field.value;
        sum = sum.value_or(0.0) + *value;
      }
    }
  }
  return out;
}

}  // namespace moeserve::server

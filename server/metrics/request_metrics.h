// The histograms about the requests to one model. They continue when the model is replaced by a new
// version.
#pragma once

#include "server/metrics/prometheus.h"

namespace moeserve::server {

// Thread-safe. The engine thread calls these functions, so none of them blocks.
struct RequestMetrics {
  RequestMetrics();

  // Writes all families.
  void Write(PrometheusText& text) const;

  // Times are in seconds.
  Histogram time_to_first_token;
  Histogram inter_token_latency;
  Histogram request_time_per_output_token;
  Histogram request_duration;
  Histogram request_prompt_tokens;
  Histogram request_generation_tokens;
  Histogram request_max_tokens;
  Histogram request_n;
};

}  // namespace moeserve::server

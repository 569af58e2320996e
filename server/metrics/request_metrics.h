// The histograms about the requests to one model. They continue when the model is replaced by a new
// version.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "server/metrics/prometheus.h"

namespace moeserve::server {

// Thread-safe. The engine thread calls these functions, so none of them blocks.
struct RequestMetrics {
  RequestMetrics();

  // Writes all families.
  void Write(PrometheusText& text) const;

  // Counts an accepted request. `task` is one of TaskNames() (engine/validate_request.h).
  void CountRequest(std::string_view task);

  static constexpr std::string_view kTasks[] = {
      "generate", "embed", "token_embed", "classify", "token_classify", "score", "fill_mask"};
  std::array<std::atomic<uint64_t>, std::size(kTasks)> requests{};  // by task
  std::atomic<uint64_t> encode_tokens{0};  // tokens of texts of which something was computed

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

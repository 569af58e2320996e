// Exports the server's metrics under the names of vLLM and SGLang, for dashboards made for those
// servers.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/metrics/prometheus.h"
#include "server/metrics/request_metrics.h"

namespace moeserve::server {

struct MetricsCompat {
  bool vllm = false;
  bool sglang = false;
};

// Parses "vllm" and "sglang", in any order. InvalidArgument for other words.
Result<MetricsCompat> ParseMetricsCompat(const std::vector<std::string>& words);

// Writes "http_requests_total": the number of requests by path, method and class of status ("2xx"),
// as vLLM's HTTP layer groups them.
void WriteHttpRequests(PrometheusText& text, const Metrics& metrics);
// Writes one model's families named "vllm:..." with the labels model_name and engine.
void WriteVllmNames(PrometheusText& text, const RequestMetrics& metrics, const EngineStats& stats,
                    const std::string& model);
// Writes one model's families named "sglang:..." with the label model_name.
void WriteSglangNames(PrometheusText& text, const RequestMetrics& metrics, const EngineStats& stats,
                      const std::string& model);

}  // namespace moeserve::server

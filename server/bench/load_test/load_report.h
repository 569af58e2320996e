// The report of a load run: exact percentiles, as a table and as JSON.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/bench/load_test/driver.h"
#include "server/bench/load_test/idle_streams.h"
#include "server/bench/load_test/server_counters.h"

namespace moeserve::server {

// Statistics of all samples. A percentile is the smallest sample such that at least that share of
// the samples is not larger.
struct Distribution {
  int64_t count = 0;  // 0: the other members are undefined
  double mean = 0.0;
  double p50 = 0.0;
  double p90 = 0.0;
  double p99 = 0.0;
  double max = 0.0;
};

Distribution Summarize(std::vector<double> samples);

// Seconds, of requests that were completed.
struct LatencyGroup {
  int64_t requests = 0;
  Distribution first_token;       // from the start to the first piece of output
  Distribution inter_token;       // between one piece of output and the next
  Distribution per_output_token;  // of a request: first to last piece, by its tokens less one
  Distribution duration;          // from the start to the end
};

struct LoadReport {
  int64_t started = 0;
  int64_t completed = 0;
  int64_t wrong_length = 0;  // completed with another number of tokens than was asked for
  int64_t unanswered = 0;
  int64_t answered_twice = 0;
  int64_t cut_off = 0;

  double seconds = 0.0;  // from the beginning to the last end
  double requests_per_second = 0.0;
  double input_tokens_per_second = 0.0;   // of completed requests
  double output_tokens_per_second = 0.0;  // of all
  // While requests were started; absent if that was less than a fifth of the run.
  std::optional<double> full_load_output_tokens_per_second;

  LatencyGroup all;
  LatencyGroup normal;       // of requests with a prompt of ordinary length
  LatencyGroup long_prompt;  // of the others
  Distribution start_lag;    // how late the sender was; open loop only

  std::map<std::string, Distribution> errors;  // latency by kind
  Distribution refusals;                       // latency of refusals before any output
  Distribution retry_after;                    // seconds asked for

  int64_t pieces = 0;  // of output that arrived
  std::optional<double> sender_cpu_seconds;
  std::optional<ServerCounters> server;  // over the run; absent if the server reports none
  std::optional<IdleStreamReport> idle_streams;
  // For the limit set by memory bandwidth; in process and on request only.
  std::optional<double> weight_bytes;    // read by the steps of the run
  std::optional<double> read_bandwidth;  // bytes per second, measured beside the run
};

// Builds the report of a finished run. The caller adds the optional parts.
LoadReport MakeReport(const LoadRun& run);

// Returns several lines, each with its newline. Times in milliseconds.
std::string ReportTable(const LoadReport& report);

// Returns one indented object. Times in seconds; null for what is not reported.
std::string ReportJson(const LoadReport& report, const std::string& target);

}  // namespace moeserve::server

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

// Statistics of a set of samples. The p-th percentile is the smallest sample such that at least p
// percent of the samples are not larger.
struct Distribution {
  int64_t count = 0;  // if 0, the other members are undefined
  double mean = 0.0;
  double p50 = 0.0;
  double p90 = 0.0;
  double p99 = 0.0;
  double max = 0.0;
};

Distribution Summarize(std::vector<double> samples);

// Latencies in seconds, from completed requests only.
struct LatencyGroup {
  int64_t requests = 0;
  Distribution first_token;       // from the start to the first piece of output
  Distribution inter_token;       // between one piece of output and the next
  Distribution per_output_token;  // per request: first to last piece, divided by tokens - 1
  Distribution duration;          // from the start to the end
};

struct LoadReport {
  int64_t started = 0;
  int64_t completed = 0;
  int64_t wrong_length = 0;  // completed, but with another number of tokens than requested
  int64_t unanswered = 0;
  int64_t answered_twice = 0;
  int64_t cut_off = 0;
  bool interrupted = false;  // the run was ended before its time

  double seconds = 0.0;  // from the begin of the run to the end of its last request
  double requests_per_second = 0.0;
  double input_tokens_per_second = 0.0;   // of completed requests
  double output_tokens_per_second = 0.0;  // of all requests
  // Output tokens per second during the part of the run in which requests were started; absent if
  // that part was shorter than a fifth of the run.
  std::optional<double> full_load_output_tokens_per_second;

  LatencyGroup all;
  LatencyGroup normal;       // requests with a prompt of ordinary length
  LatencyGroup long_prompt;  // requests with a long prompt
  Distribution start_lag;    // seconds by which the sender was late; open loop only

  std::map<std::string, Distribution> errors;  // latency per kind of error
  Distribution refusals;                       // latency of requests refused before any output
  Distribution retry_after;                    // seconds that the server asked clients to wait

  int64_t pieces = 0;  // output pieces that arrived
  std::optional<double> sender_cpu_seconds;
  std::optional<ServerCounters> server;  // change over the run, if the server reports it
  std::optional<IdleStreamReport> idle_streams;
  // weight_bytes / read_bandwidth is the least time that the run's steps can take. Both members are
  // present only if the engine runs in this process and --bandwidth is given.
  std::optional<double> weight_bytes;  // bytes of weights that the steps of the run read
  // Bytes per second: the largest of several measurements before and after the run.
  std::optional<double> read_bandwidth;
};

// Builds the report of a finished run. The caller adds the optional members.
LoadReport MakeReport(const LoadRun& run);

// Returns a table of several lines, each ending in a newline. Times are in milliseconds.
std::string ReportTable(const LoadReport& report);

// Returns one indented JSON object. Times are in seconds. Members that were not measured are null.
std::string ReportJson(const LoadReport& report, const std::string& target);

}  // namespace moeserve::server

// Sends a workload to a target in a closed or an open loop, and checks that every request gets
// exactly one response.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "server/bench/load_test/load_target.h"
#include "server/bench/load_test/workload.h"

namespace moeserve::server {

struct LoadOptions {
  int clients = 0;       // > 0: closed loop; clients, each with one request at a time
  double rate = 0.0;     // > 0: open loop; requests per second, Poisson arrivals
  uint64_t seed = 0;     // seed of the arrival times
  int64_t requests = 0;  // number to start; 0: no limit
  double seconds = 0.0;  // time during which requests are started; 0: no limit
  // Time for the running requests to end after the last start; requests that run longer are cut
  // off.
  double drain_seconds = 600;
  // Seconds that a client of the closed loop waits after an error.
  double error_pause = 0.1;
};

// One request that was started, and its result.
struct LoadSample {
  bool long_prompt = false;
  bool shared_prefix = false;
  int64_t sent_prompt_tokens = 0;  // 0 for a text prompt
  int asked_output_tokens = 0;
  int results = 0;       // number of results; 1 in a correct run
  RequestResult result;  // the first result
};

struct LoadRun {
  std::vector<LoadSample> samples;  // in order of their starts
  std::vector<double> start_lags;   // open loop: seconds by which the sender was late, per request
  double begin = 0.0;               // time on the target's clock
  double last_start = 0.0;
  double end = 0.0;
  // Requests that got no response, except the requests that were cut off.
  int64_t unanswered = 0;
  // Requests with more than one response, plus responses that belong to no request.
  int64_t answered_twice = 0;
  int64_t cut_off = 0;       // requests still running after drain_seconds, or when `stop` came
  bool interrupted = false;  // whether `stop` ended the run
};

// Returns InvalidArgument unless exactly one of `clients` and `rate` and at least one of `requests`
// and `seconds` is set.
absl::Status CheckLoadOptions(const LoadOptions& options);

// Runs the load. Blocks until all requests have ended, at most drain_seconds and a few seconds more
// after the last start. Requires that CheckLoadOptions accepts `options`. `progress`, if set, is
// told at least once a second how many seconds have passed and how many requests have ended.
// `stop`, if set, is asked several times a second; once it returns true, no request is started, and
// those that run are cut off.
using LoadProgress = std::function<void(double seconds, int64_t ended)>;
LoadRun RunLoad(const LoadOptions& options, const Workload& workload, LoadTarget& target,
                const LoadProgress& progress = {}, const std::function<bool()>& stop = {});

// Runs `requests` warm-up requests, at most `clients` at the same time. If no request succeeded,
// returns the error of the first one.
absl::Status WarmUp(int64_t requests, int clients, const Workload& workload, LoadTarget& target);

}  // namespace moeserve::server

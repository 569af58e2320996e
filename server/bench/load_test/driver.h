// Sends a workload to a target in a closed or an open loop, and checks that every request is
// answered exactly once.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/bench/load_test/load_target.h"
#include "server/bench/load_test/workload.h"

namespace moeserve::server {

struct LoadOptions {
  int clients = 0;       // > 0: closed loop, each sends its next request when the last has ended
  double rate = 0.0;     // > 0: open loop, Poisson arrivals per second
  uint64_t seed = 0;     // of the arrivals
  int64_t requests = 0;  // to start; 0: no limit
  double seconds = 0.0;  // in which requests are started; 0: no limit
  double drain_seconds = 600;  // for running requests to end; then they are cut off
  double error_pause = 0.1;    // of a closed loop's client after an error, seconds
};

// One started request.
struct LoadSample {
  bool long_prompt = false;
  bool shared_prefix = false;
  int64_t sent_prompt_tokens = 0;  // 0 for a text
  int asked_output_tokens = 0;
  int results = 0;       // 1 in a correct run
  RequestResult result;  // the first one
};

struct LoadRun {
  std::vector<LoadSample> samples;  // in order of their starts
  std::vector<double> start_lags;   // open loop: delays of the sender, seconds
  double begin = 0.0;               // on the target's clock
  double last_start = 0.0;
  double end = 0.0;
  int64_t unanswered = 0;      // ended without an answer; without those cut off
  int64_t answered_twice = 0;  // including answers to no request
  int64_t cut_off = 0;         // after drain_seconds
};

// InvalidArgument unless exactly one of clients and rate, and at least one of requests and seconds,
// are set.
absl::Status CheckLoadOptions(const LoadOptions& options);

// Runs the load; blocks until at most drain_seconds and a few more after the last start. The
// options are checked.
LoadRun RunLoad(const LoadOptions& options, const Workload& workload, LoadTarget& target);

// Runs `requests` warm-up requests, at most `clients` at the same time. Returns the error of the
// first one if none succeeded.
absl::Status WarmUp(int64_t requests, int clients, const Workload& workload, LoadTarget& target);

}  // namespace moeserve::server

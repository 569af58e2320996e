// The interface of the target of a load run. The target owns the clock, so that a test's target can
// simulate time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/bench/load_test/server_counters.h"
#include "server/bench/load_test/workload.h"

namespace moeserve::server {

// The result of one request. Times are seconds on the target's clock.
struct RequestResult {
  int64_t index = 0;
  double start = 0.0;  // time at which the request was due; a late sender adds to the latency
  double end = 0.0;
  std::vector<double> arrivals;  // arrival time of each output piece, usually one token
  int64_t prompt_tokens = 0;     // as the server reports, else as sent
  int64_t output_tokens = 0;     // as the server reports, else the number of pieces
  // Empty if the response is complete, else one of few fixed texts, such as "503 queue_full" or
  // "timeout".
  std::string error;
  bool refused = false;               // the server answered with an error before any output
  bool answered = false;              // the server ended the request, with a completion or an error
  bool cut_off = false;               // ended by CancelAll()
  bool duplicate = false;             // data followed the end of the response
  std::optional<double> retry_after;  // seconds that the server asked the client to wait
};

// Must be used by one thread only.
class LoadTarget {
 public:
  virtual ~LoadTarget() = default;

  // Returns monotonic time in seconds.
  virtual double Now() = 0;

  // Starts a request without blocking. `scheduled` becomes the start time in its result.
  virtual void Start(const LoadRequest& request, double scheduled) = 0;

  // Blocks until results arrive or until time `until`, and returns the results. Every request gets
  // exactly one result.
  virtual std::vector<RequestResult> Wait(double until) = 0;

  // Cancels running requests. Wait() returns their results soon afterwards, with `cut_off` set.
  virtual void CancelAll() = 0;

  // Returns the number of responses that belong to no request.
  virtual int64_t StrayAnswers() const { return 0; }

  // Returns the server's counters since its start. Unavailable if the server reports none.
  virtual Result<ServerCounters> Counters() = 0;
};

}  // namespace moeserve::server

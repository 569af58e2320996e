// The interface of the target of a load run. The target owns the clock, so that a scripted one can
// use simulated time.
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
  double start = 0.0;  // scheduled time: the sender's delay counts as latency
  double end = 0.0;
  std::vector<double> arrivals;  // of each piece of output
  int64_t prompt_tokens = 0;     // reported by the server, else as sent
  int64_t output_tokens = 0;     // reported by the server, else pieces
  std::string error;             // empty: complete. A short closed set: "503 queue_full", "timeout"
  bool refused = false;          // before any output; error has status and code
  bool answered = false;         // the server ended it: completion or error
  bool cut_off = false;          // ended by CancelAll()
  bool duplicate = false;        // data followed the end
  std::optional<double> retry_after;  // seconds, from the server
};

// Used by one thread.
class LoadTarget {
 public:
  virtual ~LoadTarget() = default;

  // Returns monotonic time in seconds.
  virtual double Now() = 0;

  // Starts a request without blocking. `scheduled` becomes its start time.
  virtual void Start(const LoadRequest& request, double scheduled) = 0;

  // Blocks until results arrive or until time `until`, and returns the results. Every request has
  // exactly one.
  virtual std::vector<RequestResult> Wait(double until) = 0;

  // Cancels running requests; Wait() returns their results soon, with cut_off set.
  virtual void CancelAll() = 0;

  // Returns the number of answers that belong to no request.
  virtual int64_t StrayAnswers() const { return 0; }

  // Returns the server's counters since its start. Unavailable: it reports none.
  virtual Result<ServerCounters> Counters() = 0;
};

}  // namespace moeserve::server

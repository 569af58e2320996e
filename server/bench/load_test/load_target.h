// What a load run needs of the thing under load. A target also owns the clock, so that a scripted
// one can run in simulated time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/bench/load_test/server_counters.h"
#include "server/bench/load_test/workload.h"

namespace moeserve::server {

// How one request ended, as its sender saw it. Times are seconds on the target's clock.
struct RequestResult {
  int64_t index = 0;
  double start = 0.0;  // when it was to be sent: waiting for the sender's own delay is latency too
  double end = 0.0;
  std::vector<double> arrivals;  // of each piece of output
  int64_t prompt_tokens = 0;     // as the server says, else as sent
  int64_t output_tokens = 0;     // as the server says, else pieces counted
  std::string error;             // empty: complete. A short closed set: "503 queue_full", "timeout"
  bool refused = false;    // the server said no before any output: error has a status and a code
  bool answered = false;   // an end came from the server: completion or error
  bool cut_off = false;    // ended by CancelAll()
  bool duplicate = false;  // more came after the end
  std::optional<double> retry_after;  // seconds, as the server asked for
};

// Used by one thread.
class LoadTarget {
 public:
  virtual ~LoadTarget() = default;

  // Seconds since some moment; never goes back.
  virtual double Now() = 0;

  // Begins a request and returns at once. `scheduled` becomes its start.
  virtual void Start(const LoadRequest& request, double scheduled) = 0;

  // Blocks until results have arrived or `until` has come, and gives what there is. Every request
  // has exactly one result.
  virtual std::vector<RequestResult> Wait(double until) = 0;

  // Breaks off what is running; the results come from Wait() soon, with cut_off set.
  virtual void CancelAll() = 0;

  // Answers that belong to no request: a server that answers twice.
  virtual int64_t StrayAnswers() const { return 0; }

  // The server's own counters since its start. Unavailable: it reports none.
  virtual Result<ServerCounters> Counters() = 0;
};

}  // namespace moeserve::server

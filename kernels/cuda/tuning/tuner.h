// Finds the fastest of several kernels with equal results by measuring them on the device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace moeserve::cuda {

struct TuneCandidate {
  std::string name;
  // Enqueues the operation once. `turn` counts the calls of a measurement; it selects among equal
  // operands, so that one call does not find those of the call before in a cache. Turn 0 always has
  // the same operands.
  std::function<void(int turn)> enqueue;
  // If set, it takes the place of `enqueue` where results are compared, and brings them to the
  // output of the device, to which `enqueue` does not write.
  std::function<void(int turn)> enqueue_to_output = {};
};

// An operation that is measured with one number of rows. The first candidate is the default.
struct TuneCase {
  std::string name;  // for messages
  std::vector<TuneCandidate> candidates;
};

// What the tuner needs from the device. The implementation for GPUs is in graph_device.h.
class TuneDevice {
 public:
  virtual ~TuneDevice() = default;
  // Prepares repeated measurements of an operation. Each call of the result measures it once and
  // returns the time of one operation, in microseconds.
  virtual Result<std::function<Result<double>()>> Prepare(
      const std::function<void(int turn)>& enqueue) = 0;
  // Runs turn 0 of the default and keeps the result.
  virtual Status RunDefault(const std::function<void(int turn)>& enqueue) = 0;
  // Runs turn 0 and returns whether every bit of the result is that of the default.
  virtual Result<bool> EqualsDefault(const std::function<void(int turn)>& enqueue) = 0;
};

struct TuneResult {
  int chosen = 0;                      // index of the candidate
  std::vector<double> microseconds;    // of each candidate: the median, or 0 if it was not measured
  std::vector<std::string> different;  // names of the candidates whose results differ
};

// Returns the numbers of rows that are measured for operations of up to `most` rows: 1, factor,
// factor^2, ..., most.
std::vector<int64_t> NumbersOfRows(int64_t most, int factor);

// Measures the candidates one after another, several times, and returns the fastest. A candidate
// whose result differs from that of the default is never chosen. Another one replaces the default
// only if it takes at least 2 % less time, and of equal times the first one wins, so that two runs
// seldom choose differently. Candidates that are far slower are measured only twice.
Result<TuneResult> Tune(const TuneCase& tune_case, TuneDevice& device);

}  // namespace moeserve::cuda

// The clock of all durations, deadlines and timeouts.
#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace moeserve {

// Returns the time of the steady clock, which nobody can set, as an absl::Time. Only differences of
// such times have a meaning, and only within one process: they must not be mixed with absl::Now(),
// which can jump.
inline absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// Returns the std::chrono form of a SteadyNow() time, at most a day from now, so that it can be
// given to wait_until().
inline std::chrono::steady_clock::time_point ToSteadyTimePoint(absl::Time time) {
  const absl::Duration left = time - SteadyNow();
  const absl::Duration day = absl::Hours(24);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             absl::ToChronoNanoseconds(left < absl::ZeroDuration() ? absl::ZeroDuration()
                                       : left > day                ? day
                                                                   : left));
}

}  // namespace moeserve

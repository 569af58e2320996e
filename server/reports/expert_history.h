// Snapshots of the expert statistics over the last minutes, for statistics of a time window and for
// readers that must not wait for the engine.
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>

#include "absl/time/time.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve::server {

// The time of a monotonic clock.
inline absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// Thread-safe.
class ExpertHistory {
 public:
  static constexpr int kMaxWindowSeconds = 600;

  // Call about once a second with SteadyNow(). Ignores a snapshot that is older than the last one.
  // Snapshots older than a minute are thinned to one every ten seconds.
  void Add(absl::Time now, ExpertStats snapshot);

  // Returns the newest snapshot, if there is one.
  std::optional<ExpertStats> Latest() const;

  struct Base {
    ExpertStats stats;
    absl::Time time;
  };
  // Returns the newest snapshot that is at least `window` old, or the oldest if all are newer.
  std::optional<Base> Before(absl::Time now, absl::Duration window) const;

 private:
  mutable std::mutex mutex_;
  std::deque<Base> snapshots_;
};

}  // namespace moeserve::server

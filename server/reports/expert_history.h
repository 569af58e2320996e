// Snapshots of the expert statistics over the last minutes, for questions about a time window and
// for readers that must not disturb the engine.
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>

#include "absl/time/time.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve::server {

// The time of a clock that nobody sets.
inline absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// Thread-safe.
class ExpertHistory {
 public:
  static constexpr int kMaxWindowSeconds = 600;

  // To be called about once a second with SteadyNow(). A snapshot that is older than the last one
  // is left out. Kept at that resolution for a
  // minute, then every ten seconds.
  void Add(absl::Time now, ExpertStats snapshot);

  // The newest snapshot, if there is one.
  std::optional<ExpertStats> Latest() const;

  struct Base {
    ExpertStats stats;
    absl::Time time;
  };
  // The youngest snapshot that is at least `window` old; the oldest one if all are younger.
  std::optional<Base> Before(absl::Time now, absl::Duration window) const;

 private:
  mutable std::mutex mutex_;
  std::deque<Base> snapshots_;
};

}  // namespace moeserve::server

// Keeps snapshots of the expert statistics from the last minutes: for statistics of a time window,
// and for readers that must not wait for the engine.
#pragma once

#include <deque>
#include <mutex>
#include <optional>

#include "absl/time/time.h"
#include "base/steady_clock.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve::server {

// Thread-safe.
class ExpertHistory {
 public:
  static constexpr int kMaxWindowSeconds = 600;

  // Adds a snapshot. Must be called about once per second, with SteadyNow(). Ignores a snapshot
  // that is older than the newest one. Of the snapshots older than a minute, only one every ten
  // seconds is kept; of those older than kMaxWindowSeconds, only the newest.
  void Add(absl::Time now, ExpertStats snapshot);

  // Returns the newest snapshot; nullopt if there is none.
  std::optional<ExpertStats> Latest() const;

  struct Base {
    ExpertStats stats;
    absl::Time time;
  };
  // Returns the newest snapshot that is at least `window` old at `now`, or the oldest snapshot if
  // all are newer; nullopt if there is none.
  std::optional<Base> Before(absl::Time now, absl::Duration window) const;

 private:
  mutable std::mutex mutex_;
  std::deque<Base> snapshots_;
};

}  // namespace moeserve::server

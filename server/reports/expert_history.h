// Keeps snapshots of the expert statistics from the last minutes: for statistics of a time window,
// and for readers that must not wait for the engine.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/steady_clock.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve::server {

// Thread-safe.
class ExpertHistory {
 public:
  static constexpr int kMaxWindowSeconds = 600;
  static constexpr size_t kMaxBytes = size_t{64} << 20;
  static constexpr size_t kFewestSnapshots = 4;  // kept whatever their size

  // Keeps snapshots of about `max_bytes` together, but at least kFewestSnapshots.
  explicit ExpertHistory(size_t max_bytes = kMaxBytes) : max_bytes_(max_bytes) {}

  // Adds a snapshot. Must be called about once per second, with SteadyNow(). Ignores a snapshot
  // that is older than the newest one. Of the snapshots older than a minute, only one every ten
  // seconds is kept; of those older than kMaxWindowSeconds, only the newest. If they are too large
  // together, more go: those whose neighbours are closest, measured by their age.
  void Add(absl::Time now, ExpertStats snapshot);

  // Returns the newest snapshot; null if there is none.
  std::shared_ptr<const ExpertStats> Latest() const;

  struct Base {
    std::shared_ptr<const ExpertStats> stats;  // never null
    absl::Time time;
  };
  // Returns the newest snapshot that is at least `window` old at `now`, or the oldest snapshot if
  // all are newer; nullopt if there is none.
  std::optional<Base> Before(absl::Time now, absl::Duration window) const;

  // Returns about how many bytes the snapshots take.
  size_t bytes() const;

 private:
  size_t BytesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ThinOut(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_bytes_;
  mutable Mutex mutex_;
  // Snapshots between which nothing was computed share their statistics.
  std::deque<Base> snapshots_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve::server

// Snapshots of the expert statistics over the last minutes, for questions about a time window and
// for readers that must not disturb the engine.
#pragma once

#include <deque>
#include <mutex>
#include <optional>

#include "absl/time/time.h"
#include "engine/expert_stats.h"

namespace moeserve::server {

// Thread-safe.
class ExpertHistory {
 public:
  static constexpr int kMaxWindowSeconds = 600;

  // To be called about once a second, `now` never decreasing. Kept at that resolution for a
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

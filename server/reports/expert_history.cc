#include "server/reports/expert_history.h"

#include <utility>

namespace moeserve::server {

void ExpertHistory::Add(absl::Time now, ExpertStats snapshot) {
  std::lock_guard lock(mutex_);
  if (!snapshots_.empty() &&
      (snapshot.steps < snapshots_.back().stats.steps || now < snapshots_.back().time)) {
    return;
  }
  snapshots_.push_back({std::move(snapshot), now});
  while (snapshots_.size() > 1 && now - snapshots_[1].time >= absl::Seconds(kMaxWindowSeconds)) {
    snapshots_.pop_front();
  }
  // Thins out snapshots older than a minute: a snapshot goes if its two neighbours are at most 10 s
  // apart. One removal per added snapshot is enough to keep up.
  for (size_t i = 1; i + 1 < snapshots_.size(); ++i) {
    if (now - snapshots_[i].time < absl::Seconds(60)) break;
    if (snapshots_[i + 1].time - snapshots_[i - 1].time <= absl::Seconds(10)) {
      snapshots_.erase(snapshots_.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
}

std::optional<ExpertStats> ExpertHistory::Latest() const {
  std::lock_guard lock(mutex_);
  if (snapshots_.empty()) return std::nullopt;
  return snapshots_.back().stats;
}

std::optional<ExpertHistory::Base> ExpertHistory::Before(absl::Time now,
                                                         absl::Duration window) const {
  std::lock_guard lock(mutex_);
  if (snapshots_.empty()) return std::nullopt;
  for (auto it = snapshots_.rbegin(); it != snapshots_.rend(); ++it) {
    if (now - it->time >= window) return *it;
  }
  return snapshots_.front();
}

}  // namespace moeserve::server

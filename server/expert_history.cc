#include "server/expert_history.h"

#include <utility>

namespace moeserve::server {

ExpertStats Difference(const ExpertStats& later, const ExpertStats& earlier) {
  ExpertStats out = later;
  out.tokens -= earlier.tokens;
  out.steps -= earlier.steps;
  for (size_t b = 0; b < out.blocks.size() && b < earlier.blocks.size(); ++b) {
    BlockExpertStats& to = out.blocks[b];
    const BlockExpertStats& from = earlier.blocks[b];
    for (int phase = 0; phase < kNumPhases; ++phase) {
      to.tokens[phase] -= from.tokens[phase];
      to.rows[phase] -= from.rows[phase];
    }
    to.nonfinite_rows -= from.nonfinite_rows;
    const auto subtract = [](auto& minuend, const auto& subtrahend) {
      for (size_t i = 0; i < minuend.size() && i < subtrahend.size(); ++i) {
        minuend[i] -= subtrahend[i];
      }
    };
    subtract(to.selections, from.selections);
    subtract(to.weight_sums, from.weight_sums);
    subtract(to.visits, from.visits);
    subtract(to.distinct_histogram, from.distinct_histogram);
  }
  return out;
}

void ExpertHistory::Add(absl::Time now, ExpertStats snapshot) {
  std::lock_guard lock(mutex_);
  snapshots_.push_back({std::move(snapshot), now});
  while (snapshots_.size() > 1 && now - snapshots_[1].time >= absl::Seconds(kMaxWindowSeconds)) {
    snapshots_.pop_front();
  }
  // Thins out what has just become older than a minute: one entry a call at most.
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

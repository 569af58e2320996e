#include "server/reports/expert_history.h"

#include <utility>

namespace moeserve::server {
namespace {

size_t SizeOf(const ExpertStats& stats) {
  size_t bytes = sizeof(stats);
  const auto add = [&bytes](const auto& values) { bytes += values.size() * sizeof(values[0]); };
  add(stats.diversity_histogram);
  for (const BlockExpertStats& block : stats.blocks) {
    bytes += sizeof(block);
    add(block.selections);
    add(block.decode_selections);
    add(block.weight_sums);
    add(block.touching_tokens);
    add(block.visits);
    add(block.distinct_histogram);
    add(block.recomputed_selections);
    add(block.rejected_selections);
    add(block.router.probability_sums);
    add(block.router.selections);
    add(block.expert_parameters);
    add(block.expert_widths);
  }
  return bytes;
}

// Returns whether no token was computed between the two snapshots, so that all counters are equal.
bool Same(const ExpertStats& a, const ExpertStats& b) {
  return a.steps == b.steps && a.tokens == b.tokens && a.recomputed_tokens == b.recomputed_tokens &&
         a.rejected_tokens == b.rejected_tokens;
}

}  // namespace

void ExpertHistory::Add(absl::Time now, ExpertStats snapshot) {
  MutexLock lock(mutex_);
  std::shared_ptr<const ExpertStats> stats;
  if (!snapshots_.empty()) {
    const Base& newest = snapshots_.back();
    if (snapshot.steps < newest.stats->steps || now < newest.time) return;
    if (Same(snapshot, *newest.stats)) stats = newest.stats;
  }
  if (stats == nullptr) stats = std::make_shared<const ExpertStats>(std::move(snapshot));
  snapshots_.push_back({std::move(stats), now});
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
  ThinOut(now);
}

void ExpertHistory::ThinOut(absl::Time now) {
  while (snapshots_.size() > kFewestSnapshots && BytesLocked() > max_bytes_) {
    size_t worst = 1;
    double least = 0.0;
    for (size_t i = 1; i + 1 < snapshots_.size(); ++i) {
      const double gap = absl::ToDoubleSeconds(snapshots_[i + 1].time - snapshots_[i - 1].time);
      const double age = absl::ToDoubleSeconds(now - snapshots_[i].time);
      const double share = gap / (age + 1.0);
      if (i == 1 || share < least) {
        least = share;
        worst = i;
      }
    }
    snapshots_.erase(snapshots_.begin() + static_cast<std::ptrdiff_t>(worst));
  }
}

size_t ExpertHistory::BytesLocked() const {
  size_t bytes = 0;
  const ExpertStats* previous = nullptr;
  for (const Base& snapshot : snapshots_) {
    if (snapshot.stats.get() != previous) bytes += SizeOf(*snapshot.stats);
    previous = snapshot.stats.get();
  }
  return bytes;
}

size_t ExpertHistory::bytes() const {
  MutexLock lock(mutex_);
  return BytesLocked();
}

std::shared_ptr<const ExpertStats> ExpertHistory::Latest() const {
  MutexLock lock(mutex_);
  return snapshots_.empty() ? nullptr : snapshots_.back().stats;
}

std::optional<ExpertHistory::Base> ExpertHistory::Before(absl::Time now,
                                                         absl::Duration window) const {
  MutexLock lock(mutex_);
  if (snapshots_.empty()) return std::nullopt;
  for (auto it = snapshots_.rbegin(); it != snapshots_.rend(); ++it) {
    if (now - it->time >= window) return *it;
  }
  return snapshots_.front();
}

}  // namespace moeserve::server

#include "engine/balance/load_watch.h"

#include <algorithm>
#include <cmath>

namespace moeserve {

LoadWatch::LoadWatch(std::function<absl::Time()> now) : now_(std::move(now)), base_(now_()) {}

double LoadWatch::WeightNow() {
  // Far from the largest double, also after many rows.
  constexpr double kMostHalfLives = 500.0;
  const double half_lives = absl::FDivDuration(now_() - base_, kHalfLife);
  if (half_lives <= kMostHalfLives) return std::exp2(half_lives);
  const double factor = std::exp2(-half_lives);
  for (auto& [key, block] : blocks_) {
    for (double& rows : block.rows) rows *= factor;
  }
  base_ += half_lives * kHalfLife;
  return 1.0;
}

void LoadWatch::Add(std::pair<Stack, int> block, std::span<const int32_t> rows, double imbalance) {
  const MutexLock lock(mutex_);
  const double weight = WeightNow();
  Block& counted = blocks_[block];
  counted.rows.resize(std::max(counted.rows.size(), rows.size()));
  for (size_t e = 0; e < rows.size(); ++e) counted.rows[e] += weight * rows[e];
  if (imbalance == 0.0) return;  // no expert had rows
  constexpr double kDecay = 1.0 - 1.0 / kSteps;
  counted.imbalances = counted.imbalances * kDecay + imbalance;
  counted.steps = counted.steps * kDecay + 1.0;
}

void LoadWatch::Clear() {
  const MutexLock lock(mutex_);
  blocks_.clear();
}

double LoadWatch::imbalance() const {
  const MutexLock lock(mutex_);
  double sum = 0.0;
  int count = 0;
  for (const auto& [key, block] : blocks_) {
    if (block.steps == 0.0) continue;
    sum += block.imbalances / block.steps;
    ++count;
  }
  return count == 0 ? 0.0 : sum / count;
}

ExpertLoads LoadWatch::loads() const {
  const MutexLock lock(mutex_);
  ExpertLoads loads;
  for (const auto& [key, block] : blocks_) loads[key] = block.rows;
  return loads;
}

}  // namespace moeserve

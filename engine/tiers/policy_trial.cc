#include "engine/tiers/policy_trial.h"

namespace moeserve {

TierPolicy PolicyTrial::policy() const {
  if (fixed_.has_value()) return *fixed_;
  if (steps_ >= 2 * kSteps) return *kept_;
  return steps_ / kTurn % 2 == 0 ? TierPolicy::kMap : TierPolicy::kAhead;
}

void PolicyTrial::AddStep(int64_t bytes, double seconds, TimePoint now) {
  if (fixed_.has_value() || bytes <= 0) return;
  if (steps_ >= 2 * kSteps) {
    if (now - decided_ < kInterval) return;
    steps_ = 0;  // the trial begins with the next step
    sums_[0] = sums_[1] = {};
    return;
  }
  Sum& sum = sums_[static_cast<size_t>(policy())];
  sum.bytes += static_cast<double>(bytes);
  sum.seconds += seconds;
  if (++steps_ == 2 * kSteps) Decide(now);
}

void PolicyTrial::Decide(TimePoint now) {
  const Sum& map = sums_[static_cast<size_t>(TierPolicy::kMap)];
  const Sum& ahead = sums_[static_cast<size_t>(TierPolicy::kAhead)];
  // Speeds as products, because a time may be 0.
  const double of_ahead = ahead.bytes * map.seconds;
  const double of_map = map.bytes * ahead.seconds;
  const double least = kept_ == TierPolicy::kAhead ? kLeast : 1.0;
  kept_ = of_ahead >= least * of_map ? TierPolicy::kAhead : TierPolicy::kMap;
  decided_ = now;
}

}  // namespace moeserve

// Chooses the faster policy of tiers by trying both on live steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "engine/tiers/tier_options.h"

namespace moeserve {

// A trial runs 32 steps with each policy, in turns of 8, because the work of steps changes. The
// policy with less time per byte of chosen experts is kept until the next trial, 10 minutes later.
// `kAhead`, once kept, is left only if its speed falls below 0.98 of that of `kMap`.
//
// Bytes in memory count like bytes from disk: a policy that keeps the better pages is the faster
// one.
class PolicyTrial {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr int kSteps = 32;
  static constexpr int kTurn = 8;
  static constexpr double kLeast = 0.98;
  static constexpr std::chrono::minutes kInterval{10};

  // `fixed`: the policy of all steps; nullopt: the first trial begins with the first step.
  explicit PolicyTrial(std::optional<TierPolicy> fixed) : fixed_(fixed) {}

  // Returns the policy of the next step.
  TierPolicy policy() const;
  // Says that a step took `seconds` for the products of experts with `bytes`, and ended at `now`.
  // Steps without such products do not count.
  void AddStep(int64_t bytes, double seconds, TimePoint now);

 private:
  struct Sum {
    double bytes = 0.0;
    double seconds = 0.0;
  };
  void Decide(TimePoint now);

  const std::optional<TierPolicy> fixed_;
  int steps_ = 0;                   // of the trial; 2 * kSteps: no trial is under way
  Sum sums_[2];                     // of the trial, by policy
  std::optional<TierPolicy> kept_;  // nullopt before the end of the first trial
  TimePoint decided_;
};

}  // namespace moeserve

// Which policy of tiers is kept, with a clock of the test.

#include "engine/tiers/policy_trial.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace moeserve::testing {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

// Steps of a model whose policies have given times per byte.
class TrialSteps {
 public:
  explicit TrialSteps(std::optional<TierPolicy> fixed = std::nullopt) : trial_(fixed) {}

  // Runs steps; returns their policies: "m" or "a" for each.
  std::string Run(int steps) {
    std::string policies;
    for (int i = 0; i < steps; ++i) {
      const bool ahead = trial_.policy() == TierPolicy::kAhead;
      policies += ahead ? 'a' : 'm';
      const int64_t bytes = 1000 + 100 * (i % 7);
      trial_.AddStep(bytes, (ahead ? ahead_ : map_) * static_cast<double>(bytes), now_);
      now_ += seconds(1);
    }
    return policies;
  }
  void Times(double map, double ahead) {
    map_ = map;
    ahead_ = ahead;
  }
  void Wait(std::chrono::seconds time) { now_ += time; }
  PolicyTrial& trial() { return trial_; }

 private:
  PolicyTrial trial_;
  PolicyTrial::TimePoint now_ = PolicyTrial::TimePoint() + minutes(1);
  double map_ = 1.0, ahead_ = 1.0;
};

const std::string kTurns = "mmmmmmmmaaaaaaaa";
const std::string kTrial = kTurns + kTurns + kTurns + kTurns;

TEST(PolicyTrial, AFixedPolicyStays) {
  for (const TierPolicy policy : {TierPolicy::kMap, TierPolicy::kAhead}) {
    TrialSteps steps(policy);
    steps.Times(1.0, policy == TierPolicy::kAhead ? 9.0 : 0.1);
    EXPECT_EQ(steps.Run(200), std::string(200, policy == TierPolicy::kAhead ? 'a' : 'm'));
  }
}

TEST(PolicyTrial, BothRun32StepsAndTheFasterIsKept) {
  TrialSteps ahead;
  ahead.Times(1.0, 0.9);
  EXPECT_EQ(ahead.Run(64), kTrial);
  EXPECT_EQ(ahead.Run(100), std::string(100, 'a'));
  TrialSteps map;
  map.Times(1.0, 1.01);
  EXPECT_EQ(map.Run(64), kTrial);
  EXPECT_EQ(map.Run(100), std::string(100, 'm'));
}

TEST(PolicyTrial, ATrialBeginsEveryTenMinutes) {
  TrialSteps steps;
  steps.Times(1.0, 2.0);
  steps.Run(64);
  EXPECT_EQ(steps.Run(30), std::string(30, 'm'));
  steps.Wait(minutes(9));
  EXPECT_EQ(steps.Run(10), std::string(10, 'm'));
  steps.Wait(minutes(1));
  steps.Times(1.0, 0.5);
  EXPECT_EQ(steps.Run(1), "m") << "a trial begins between steps";
  EXPECT_EQ(steps.Run(64), kTrial);
  EXPECT_EQ(steps.Run(10), std::string(10, 'a'));
}

TEST(PolicyTrial, ReturnsToMapBelow98Percent) {
  TrialSteps steps;
  steps.Times(1.0, 0.5);
  steps.Run(64);
  EXPECT_EQ(steps.Run(1), "a");
  const auto again = [&](double ahead) {
    steps.Wait(minutes(11));
    steps.Times(1.0, ahead);
    steps.Run(65);
    return steps.Run(1);
  };
  EXPECT_EQ(again(1.0 / 0.99), "a") << "a little slower is no reason to change";
  EXPECT_EQ(again(1.0 / 0.97), "m");
  EXPECT_EQ(again(1.0 / 0.99), "m") << "a little slower is no reason to change back";
  EXPECT_EQ(again(0.99), "a");
}

TEST(PolicyTrial, StepsCountByTheirBytes) {
  PolicyTrial trial(std::nullopt);
  const PolicyTrial::TimePoint now{};
  // The steps of kAhead take longer, and have more bytes.
  for (int i = 0; i < 64; ++i) {
    const bool ahead = trial.policy() == TierPolicy::kAhead;
    trial.AddStep(ahead ? 100 : 10, ahead ? 5.0 : 1.0, now);
  }
  EXPECT_EQ(trial.policy(), TierPolicy::kAhead);
}

TEST(PolicyTrial, StepsWithoutExpertsDoNotCount) {
  PolicyTrial trial(std::nullopt);
  for (int i = 0; i < 100; ++i) trial.AddStep(0, 1.0, {});
  EXPECT_EQ(trial.policy(), TierPolicy::kMap);
  for (int i = 0; i < 8; ++i) trial.AddStep(1, 0.0, {});
  EXPECT_EQ(trial.policy(), TierPolicy::kAhead) << "the first turn is over";
}

}  // namespace
}  // namespace moeserve::testing

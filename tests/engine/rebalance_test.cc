// Counters of a running model, and the placements that are planned from them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>

#include "engine/balance/load_watch.h"
#include "engine/balance/rebalance_plan.h"

namespace moeserve {
namespace {

const std::pair<Stack, int> kBlock{Stack::kOnly, 1}, kOther{Stack::kOnly, 3};

TEST(LoadWatchTest, RowsCountHalfAfterFiveMinutes) {
  absl::Time now = absl::UnixEpoch();
  LoadWatch watch([&] { return now; });
  EXPECT_TRUE(watch.loads().empty());
  const auto ratio = [&] {
    const ExpertLoads loads = watch.loads();
    return loads.at(kBlock)[0] / loads.at(kBlock)[1];
  };
  watch.Add(kBlock, std::vector<int32_t>{8, 0}, 1.0);
  now += absl::Minutes(5);
  watch.Add(kBlock, std::vector<int32_t>{0, 8}, 1.0);
  EXPECT_NEAR(ratio(), 0.5, 1e-9);
  now += absl::Minutes(5);
  watch.Add(kBlock, std::vector<int32_t>{0, 8}, 1.0);
  EXPECT_NEAR(ratio(), 0.25 / 1.5, 1e-9);
  // Weights do not overflow in a year.
  for (int day = 0; day < 365; ++day) {
    now += absl::Hours(24);
    watch.Add(kBlock, std::vector<int32_t>{30, 10}, 1.0);
  }
  EXPECT_NEAR(ratio(), 3.0, 1e-9);
  EXPECT_TRUE(std::isfinite(watch.loads().at(kBlock)[0]));
}

TEST(LoadWatchTest, WhatIsForgottenDoesNotCount) {
  LoadWatch watch;
  const std::vector<int32_t> rows = {3, 1};
  watch.Add({Stack::kOnly, 0}, rows, 2.0);
  EXPECT_EQ(watch.imbalance(), 2.0);
  watch.Clear();
  EXPECT_EQ(watch.imbalance(), 0.0);
  EXPECT_TRUE(watch.loads().empty());
}

TEST(LoadWatchTest, TheImbalanceIsAMeanOverStepsAndBlocks) {
  LoadWatch watch;
  EXPECT_EQ(watch.imbalance(), 0.0);
  const std::vector<int32_t> rows = {1, 2};
  watch.Add(kBlock, rows, 1.5);
  EXPECT_NEAR(watch.imbalance(), 1.5, 1e-9);
  watch.Add(kOther, rows, 1.0);
  EXPECT_NEAR(watch.imbalance(), 1.25, 1e-9);
  watch.Add(kOther, rows, 0.0);  // no rows: not a step
  EXPECT_NEAR(watch.imbalance(), 1.25, 1e-9);
  for (int i = 0; i < 20 * LoadWatch::kSteps; ++i) watch.Add(kBlock, rows, 2.0);
  EXPECT_NEAR(watch.imbalance(), 1.5, 1e-3);
}

class PlanRebalanceTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 4, kExperts = 64;

  static std::vector<double> Zipf(int rotation) {
    std::vector<double> loads(kExperts);
    for (int e = 0; e < kExperts; ++e) {
      loads[static_cast<size_t>((e + rotation) % kExperts)] = 1000.0 / std::pow(e + 1, 0.8);
    }
    return loads;
  }
  static std::vector<HolderSet> Modulo() {
    std::vector<HolderSet> holders;
    for (int e = 0; e < kExperts; ++e) holders.push_back(HolderSet{1} << e % kRanks);
    return holders;
  }
  double Predicted(const ExpertPlacement& placement, std::pair<Stack, int> block) const {
    return PredictedImbalance(placement.holders(block.first, block.second), loads_.at(block),
                              sizes_.at(block), kRanks);
  }

  // The largest expert has 14 % of the load in the first block; loads of the second one are equal.
  const ExpertLoads loads_ = {{kBlock, Zipf(3)}, {kOther, std::vector<double>(kExperts, 5.0)}};
  const ExpertSizes sizes_ = {{kBlock, std::vector<int64_t>(kExperts, 10)},
                              {kOther, std::vector<int64_t>(kExperts, 10)}};
  const ExpertPlacement start_{kRanks, {{kBlock, Modulo()}, {kOther, Modulo()}}, 6};
};

TEST_F(PlanRebalanceTest, UnequalBlocksImprove) {
  const double before = Predicted(start_, kBlock);
  EXPECT_GT(before, 1.25);
  const auto plan = PlanRebalance(start_, loads_, sizes_, sizes_);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->placement.version(), 7u);
  EXPECT_LT(Predicted(plan->placement, kBlock), 1.03);
  EXPECT_EQ(plan->placement.blocks().at(kOther), start_.blocks().at(kOther));
  EXPECT_EQ(SizeOfRanks(plan->placement, sizes_), SizeOfRanks(start_, sizes_));
  int64_t moved = 0;
  for (size_t e = 0; e < kExperts; ++e) {
    const HolderSet after = plan->placement.blocks().at(kBlock)[e];
    EXPECT_EQ(std::popcount(after), 1);
    moved += 10 * std::popcount(after & ~start_.blocks().at(kBlock)[e]);
  }
  EXPECT_LE(moved, plan->bytes) << "an expert may have moved twice";
  // Nothing is left to gain.
  EXPECT_FALSE(PlanRebalance(plan->placement, loads_, sizes_, sizes_).has_value());
}

TEST_F(PlanRebalanceTest, ARoundHasALimit) {
  ExpertPlacement placement = start_;
  int rounds = 0;
  double last = Predicted(placement, kBlock);
  while (const auto plan = PlanRebalance(placement, loads_, sizes_, sizes_, {.bytes = 40})) {
    EXPECT_LE(plan->bytes, 40);
    const double now = Predicted(plan->placement, kBlock);
    EXPECT_LE(now, last * 0.95);
    last = now;
    placement = plan->placement;
    ASSERT_LT(++rounds, 20);
  }
  EXPECT_GE(rounds, 1);
  EXPECT_FALSE(PlanRebalance(start_, loads_, sizes_, sizes_, {.bytes = 19}).has_value());
  EXPECT_FALSE(PlanRebalance(start_, loads_, sizes_, sizes_, {.imbalance = 9.0}).has_value());
  EXPECT_FALSE(PlanRebalance(start_, loads_, sizes_, sizes_, {.gain = 0.9}).has_value());
  EXPECT_FALSE(PlanRebalance(start_, {}, sizes_, sizes_).has_value());
}

TEST_F(PlanRebalanceTest, CopiesKeepTheirNumber) {
  ExpertPlacement::Blocks blocks = start_.blocks();
  for (int e = 0; e < 8; ++e) {
    blocks.at(kBlock)[static_cast<size_t>(e)] |= HolderSet{1} << (e + 1) % kRanks;
  }
  const ExpertPlacement copied(kRanks, blocks);
  const auto plan = PlanRebalance(copied, loads_, sizes_, sizes_, {.imbalance = 1.0, .gain = 0.0});
  ASSERT_TRUE(plan.has_value());
  EXPECT_LT(Predicted(plan->placement, kBlock), Predicted(copied, kBlock));
  for (size_t e = 0; e < kExperts; ++e) {
    EXPECT_EQ(std::popcount(plan->placement.blocks().at(kBlock)[e]),
              std::popcount(blocks.at(kBlock)[e]));
  }
}

// Experts of different sizes change places without making the largest rank larger.
TEST_F(PlanRebalanceTest, RanksDoNotGrow) {
  ExpertSizes sizes = sizes_;
  for (size_t e = 0; e < kExperts; ++e) sizes.at(kBlock)[e] = 10 + static_cast<int64_t>(e % 7);
  const auto plan = PlanRebalance(start_, loads_, sizes, sizes);
  ASSERT_TRUE(plan.has_value());
  const auto before = SizeOfRanks(start_, sizes), after = SizeOfRanks(plan->placement, sizes);
  EXPECT_LE(*std::ranges::max_element(after), *std::ranges::max_element(before));
}

}  // namespace
}  // namespace moeserve

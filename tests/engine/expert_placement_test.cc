// Which rank has and which rank computes an expert.
#include "engine/weights/expert_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>

#include "model_loaders/checkpoint/loader.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

TEST(ExpertPlacementTest, EveryExpertWithMatricesIsOnOneRank) {
  for (const GoldenModel& model : GoldenModels()) {
    SCOPED_TRACE(model.name);
    const auto checkpoint = LoadCheckpoint(model.model, {.require_tokenizer = false});
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const ModelSpec& spec = checkpoint->spec;
    for (const int ranks : {1, 2, 3, 8}) {
      const ExpertPlacement placement = ExpertPlacement::Balanced(spec, ranks);
      for (size_t b = 0; b < spec.blocks.size(); ++b) {
        if (spec.blocks[b].routing() == nullptr) continue;
        const std::vector<int64_t> parameters = PlaceParameters(spec.blocks[b]);
        const auto& holders = placement.holders(spec.stack, static_cast<int>(b));
        ASSERT_EQ(holders.size(), parameters.size());
        std::vector<int64_t> load(static_cast<size_t>(ranks));
        int64_t largest = 0;
        for (size_t e = 0; e < holders.size(); ++e) {
          ASSERT_LT(holders[e], HolderSet{1} << ranks);
          EXPECT_EQ(std::popcount(holders[e]), parameters[e] > 0 ? 1 : 0);
          largest = std::max(largest, parameters[e]);
          if (holders[e] != 0) load[std::countr_zero(holders[e])] += parameters[e];
        }
        // The bound of a greedy division.
        const auto [least, most] = std::ranges::minmax(load);
        EXPECT_LE(most - least, largest);
      }
    }
  }
}

TEST(OwnersTest, TheCheapestHolderOwnsTheNextCostlyExpert) {
  // Costs 100 x 4, 50 x 4, 8 x 4 (of 3 rows), 8 x 1 (of one row).
  const std::vector<int32_t> rows = {50, 100, 3, 1};
  const std::vector<int64_t> parameters = {4, 4, 4, 1};
  const HolderSet both = 3;
  EXPECT_EQ(OwnersOf(rows, parameters, std::vector<HolderSet>(4, both), 2),
            (std::vector<int>{1, 0, 1, 1}));
  // A single holder is the owner, whatever it costs; an expert without holders has no owner.
  EXPECT_EQ(OwnersOf(rows, parameters, std::vector<HolderSet>{1, 1, 1, 0}, 2),
            (std::vector<int>{0, 0, 0, -1}));
  // Ties go to the lower id and the lower rank.
  EXPECT_EQ(OwnersOf(std::vector<int32_t>{9, 9, 9}, std::vector<int64_t>{1, 1, 1},
                     std::vector<HolderSet>(3, both), 2),
            (std::vector<int>{0, 1, 0}));
}

// With all experts on all ranks, no rank computes more than the mean and the costliest expert.
TEST(OwnersTest, RanksAreBalanced) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 5);
    std::vector<int32_t> rows;
    std::vector<int64_t> parameters;
    for (int e = 0; e < 32; ++e) {
      rows.push_back(static_cast<int32_t>(random() % 100));
      parameters.push_back(1 + random() % 5);
    }
    const std::vector<int> owners =
        OwnersOf(rows, parameters, std::vector<HolderSet>(32, (HolderSet{1} << ranks) - 1), ranks);
    std::vector<int64_t> load(static_cast<size_t>(ranks));
    int64_t largest = 0;
    for (size_t e = 0; e < owners.size(); ++e) {
      ASSERT_GE(owners[e], 0);
      if (rows[e] == 0) continue;
      const int64_t cost = std::max(rows[e], 8) * parameters[e];
      largest = std::max(largest, cost);
      load[static_cast<size_t>(owners[e])] += cost;
    }
    const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
    EXPECT_LE(*std::ranges::max_element(load), total / ranks + largest);
  }
}

}  // namespace
}  // namespace moeserve::testing

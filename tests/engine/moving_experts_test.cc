// Placements that follow one another, as the leader announces them.
#include "engine/ranks/moving_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "kernels/movable_experts.h"
#include "kernels/registry.h"

namespace moeserve {
namespace {

using ::testing::HasSubstr;

const std::pair<Stack, int> kFirst{Stack::kOnly, 1}, kSecond{Stack::kOnly, 3};

TEST(ExpertMovesTest, TheMovesLeadFromOnePlacementToTheNext) {
  const ExpertPlacement from(2, {{kFirst, {1, 2, 3, 0}}, {kSecond, {1, 1}}}, 4);
  const ExpertPlacement to(2, {{kFirst, {1, 3, 2, 0}}, {kSecond, {1, 1}}}, 5);
  const std::vector<ExpertMove> moves = MovesBetween(from, to);
  EXPECT_EQ(moves, (std::vector<ExpertMove>{{Stack::kOnly, 1, 1, 3}, {Stack::kOnly, 1, 2, 2}}));
  const auto after = AfterMoves(from, moves, 5);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ((*after)->blocks(), to.blocks());
  EXPECT_EQ((*after)->version(), 5u);
  EXPECT_TRUE(MovesBetween(from, from).empty());
}

TEST(ExpertMovesTest, ImpossibleMovesAreRefused) {
  const ExpertPlacement from(2, {{kFirst, {1, 2, 3, 0}}});
  const auto error = [&](const ExpertMove& move) {
    return AfterMoves(from, {move}, 2).status().ToString();
  };
  const std::string no_expert = "expected an expert with matrices";
  EXPECT_THAT(error({Stack::kOnly, 2, 0, 1}), HasSubstr(no_expert));
  EXPECT_THAT(error({Stack::kEncoder, 1, 0, 1}), HasSubstr(no_expert));
  EXPECT_THAT(error({Stack::kOnly, 1, -1, 1}), HasSubstr(no_expert));
  EXPECT_THAT(error({Stack::kOnly, 1, 4, 1}), HasSubstr(no_expert));
  EXPECT_THAT(error({Stack::kOnly, 1, 3, 1}), HasSubstr(no_expert));
  EXPECT_THAT(error({Stack::kOnly, 1, 0, 0}), HasSubstr("expected some of 2 ranks"));
  EXPECT_THAT(error({Stack::kOnly, 1, 0, 4}), HasSubstr("expected some of 2 ranks"));
  const ExpertPlacement many(kMaxRanks, {{kFirst, {1}}});
  EXPECT_TRUE(AfterMoves(many, {{Stack::kOnly, 1, 0, HolderSet{1} << 63}}, 2).ok());
}

class MovableBankTest : public ::testing::Test {
 protected:
  static constexpr int kWidth = 512;

  void SetUp() override {
    for (std::unique_ptr<Backend>& backend : backends_) {
      auto created = CreateBackend({.device = "cpu", .threads = 1});
      ASSERT_TRUE(created.ok()) << created.status();
      backend = *std::move(created);
    }
  }
  // A bank of a backend with matrices of ones for some of three experts.
  std::unique_ptr<LinearBank> Bank(int backend, std::vector<int> outputs,
                                   DType type = DType::kF32) {
    LinearBankShape shape;
    shape.in_features = {kWidth};
    shape.out_features = outputs;
    shape.weight_dtype = type;
    auto bank = backends_[backend]->NewLinearBank(std::move(shape));
    EXPECT_TRUE(bank.ok()) << bank.status();
    const std::vector<float> ones(size_t{kWidth} * kWidth, 1.0f);
    for (int e = 0; e < 3; ++e) {
      if (outputs[static_cast<size_t>(e)] == 0) continue;
      (*bank)->LoadWeight(e, LinearBank::Half::kMain, 0,
                          {ones.data(), DType::kF32, {kWidth, kWidth}, nullptr});
    }
    return *std::move(bank);
  }
  static MovableExperts& Movable(LinearBank& bank) { return dynamic_cast<MovableExperts&>(bank); }
  static int64_t Zeros(std::span<const char> bytes) { return std::ranges::count(bytes, '\0'); }

  std::unique_ptr<Backend> backends_[2];
};

TEST_F(MovableBankTest, TheMemoryOfAnExpertThatGoesIsFreed) {
  const auto bank = Bank(0, {kWidth, 0, kWidth});
  const std::span<const char> first = bank->packed_bytes(0), last = bank->packed_bytes(2);
  const int64_t before = Zeros(first);
  auto memory = Movable(*bank).DropExpert(0);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(bank->shape().out_features, (std::vector<int>{0, 0, kWidth}));
  EXPECT_EQ(Zeros(first), before) << "it is freed with the result";
  memory.reset();
  // All but the pages at the ends.
  EXPECT_GE(Zeros(first), std::ssize(first) - 2 * 4096);
  EXPECT_EQ(Zeros(last), before);
  EXPECT_EQ(Movable(*bank).DropExpert(0), nullptr);
  EXPECT_EQ(Movable(*bank).DropExpert(1), nullptr);
}

TEST_F(MovableBankTest, ABankTakesWhatItLacks) {
  const auto bank = Bank(0, {kWidth, 0, 0});
  {
    const auto other = Bank(1, {kWidth, kWidth, 0});
    ASSERT_TRUE(Movable(*bank).TakesFrom(*other));
    Movable(*bank).TakeExperts(*other);
  }
  backends_[1].reset();
  EXPECT_EQ(bank->shape().out_features, (std::vector<int>{kWidth, kWidth, 0}));
  EXPECT_NE(Movable(*bank).DropExpert(1), nullptr);
  // Only a bank without matrices takes those of another type.
  EXPECT_FALSE(Movable(*bank).TakesFrom(*Bank(0, {0, 0, kWidth}, DType::kBF16)));
  EXPECT_FALSE(Movable(*bank).TakesFrom(*Bank(0, {0, 0, kWidth, 0})));
  Movable(*bank).DropExpert(0);
  EXPECT_TRUE(Movable(*bank).TakesFrom(*Bank(0, {0, 0, kWidth}, DType::kBF16)));
}

// Such as a bank that reads a mapped file.
TEST_F(MovableBankTest, ABankOfPackedBytesStaysAsItIs) {
  const auto source = Bank(0, {kWidth, 0, kWidth});
  PackedBytes packed{.experts = {}, .owner = nullptr};
  for (int e = 0; e < 3; ++e) packed.experts.push_back(source->packed_bytes(e));
  const auto bank = backends_[0]->NewPackedBank(source->shape(), std::move(packed));
  ASSERT_TRUE(bank.ok()) << bank.status();
  EXPECT_TRUE(Movable(*source).CanTake());
  EXPECT_FALSE(Movable(**bank).CanTake());
  EXPECT_FALSE(Movable(**bank).TakesFrom(*Bank(0, {0, kWidth, 0})));
  EXPECT_EQ(Movable(**bank).DropExpert(0), nullptr);
  EXPECT_EQ((*bank)->packed_bytes(0).data(), source->packed_bytes(0).data());
}

}  // namespace
}  // namespace moeserve

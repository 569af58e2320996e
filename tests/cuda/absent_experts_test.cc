// Banks without the experts of other ranks: less memory, and the bits of banks with all experts.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/cuda/fused/fused_expert.h"
#include "tests/cuda/bank_formats.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::CudaLinearBank;
using cuda::LinearTile;

class AbsentExpertsTest : public ::testing::TestWithParam<BankFormat> {
 protected:
  struct Sizes {
    std::vector<int> in, out;
    bool gated = false, bias = false;
  };

  // Returns a bank of those experts that are `here`. Its numbers depend on the expert alone.
  std::unique_ptr<CudaLinearBank> Bank(const Sizes& sizes, const std::vector<bool>& here) const {
    LinearBankShape shape = GetParam().shape;
    shape.layer_in_features = shape.in_features = sizes.in;
    shape.layer_out_features = shape.out_features = sizes.out;
    shape.gated = sizes.gated;
    shape.bias = sizes.bias;
    for (size_t e = 0; e < here.size(); ++e) {
      if (here[e]) continue;
      shape.out_features[e] = 0;
      if (sizes.in.size() > 1) shape.in_features[e] = 0;
    }
    auto bank = std::move(CudaLinearBank::Create(shape)).value();
    for (size_t e = 0; e < here.size(); ++e) {
      if (!here[e]) continue;
      for (const LinearBank::Half half : {LinearBank::Half::kMain, LinearBank::Half::kGate}) {
        if (half == LinearBank::Half::kGate && !sizes.gated) continue;
        LoadHalf(*bank, static_cast<int>(e), half);
      }
    }
    EXPECT_TRUE(bank->holds_weights());
    return bank;
  }

  // Multiplies rows of the experts that are `here` by both banks.
  void CheckProducts(const Sizes& sizes, const std::vector<bool>& here, bool gather) const {
    const auto experts = static_cast<int>(here.size());
    const auto all = Bank(sizes, std::vector<bool>(here.size(), true));
    const auto some = Bank(sizes, here);
    EXPECT_TRUE(some->may_lack_experts());
    EXPECT_LT(some->bytes(), all->bytes());
    EXPECT_EQ(some->signature(), all->signature());
    std::vector<std::vector<int>> routes(11);
    for (size_t r = 0; r < routes.size(); ++r) {
      for (size_t e = 0; e < here.size(); ++e) {
        if (here[e] && (r + e) % 3 != 0) routes[r].push_back(static_cast<int>(e));
      }
    }
    const DevicePlan plan(experts, routes, 0);
    const int widest_in = *std::ranges::max_element(sizes.in);
    const int widest_out = *std::ranges::max_element(sizes.out);
    Random random(77);
    const int64_t inputs = gather ? std::ssize(routes) : plan.plan.capacity;
    const DeviceRows x(inputs, widest_in, RoundUp16(widest_in), GetParam().rows,
                       random.Normals(inputs * widest_in));
    const auto args = [&](const CudaLinearBank& bank, const RowsView& y) {
      return LinearArgs{.bank = &bank,
                        .plan = &plan.plan,
                        .gather = gather,
                        .input = x.view(),
                        .output = y,
                        .activation = sizes.gated ? ActivationKind::kSilu : ActivationKind::kNone,
                        .pad_output = true};
    };
    DeviceRows expected(plan.plan.capacity, widest_out, RoundUp16(widest_out), DType::kF32);
    DeviceRows found(plan.plan.capacity, widest_out, RoundUp16(widest_out), DType::kF32);
    const std::vector<LinearTile> tiles = TilesOf(args(*all, expected.view()));
    EXPECT_EQ(TilesOf(args(*some, found.view())), tiles);
    for (const LinearTile tile : tiles) {
      MultiplyBy(args(*all, expected.view()), tile);
      MultiplyBy(args(*some, found.view()), tile);
      const RowsView a = expected.Fetch(), b = found.Fetch();
      for (int i = 0; i < plan.assignments(); ++i) {
        const int out = sizes.out[static_cast<size_t>(plan.expert[static_cast<size_t>(i)])];
        ASSERT_TRUE(SameBits(a, b, i, i, out)) << "tile " << static_cast<int>(tile) << " row " << i;
      }
    }
  }
};

TEST_P(AbsentExpertsTest, ProductsHaveTheBitsOfAllExperts) {
  // Expert 2 has no matrix on any rank.
  CheckProducts({{96}, {40, 130, 0, 24, 70}, true, true}, {true, false, true, true, false}, true);
  CheckProducts({{64}, {33, 33, 33}, false, false}, {false, false, true}, false);
}

// The long sums have no slices, because of the expert that is absent.
TEST_P(AbsentExpertsTest, AnAbsentExpertDecidesAboutTheOrderOfSums) {
  CheckProducts({{1600, 64, 1664}, {24, 24, 24}, false, false}, {true, false, true}, false);
}

TEST_P(AbsentExpertsTest, AllMayBeAbsent) {
  const Sizes sizes{{64}, {33, 33}, false, true};
  const auto none = Bank(sizes, {false, false});
  EXPECT_EQ(none->bytes(), 0);
  const DevicePlan plan(2, {{}, {}}, 0);
  const DeviceRows x(2, 64, 64, GetParam().rows, std::vector<float>(128, 1.0f));
  const DeviceRows y(0, 33, 48, DType::kF32);
  MultiplyBy({.bank = none.get(),
              .plan = &plan.plan,
              .gather = true,
              .input = x.view(),
              .output = y.view()},
             LinearTile::kAuto);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

using AbsentFusedExpertsTest = AbsentExpertsTest;

TEST_P(AbsentFusedExpertsTest, FitAsAllDo) {
  const Sizes up{{64}, {48, 80, 16}, false, false}, down{{48, 80, 16}, {64, 64, 64}, false, false};
  const std::vector<bool> here = {true, false, true}, everyone(3, true);
  const auto up_all = Bank(up, everyone), up_some = Bank(up, here);
  const auto down_all = Bank(down, everyone), down_some = Bank(down, here);
  ASSERT_TRUE(cuda::FusedExpertFits(*up_all, *down_all));
  ASSERT_TRUE(cuda::FusedExpertFits(*up_some, *down_some));
  const DevicePlan plan(3, {{0}, {0, 2}, {2}}, 0);
  Random random(3);
  const DeviceRows x(3, 64, 64, DType::kBF16, random.Normals(3 * 64));
  const auto run = [&](const CudaLinearBank& first, const CudaLinearBank& second,
                       cuda::FusedTile tile, DeviceRows& y) {
    cuda::LaunchFusedExpert({.up = &first,
                             .down = &second,
                             .plan = &plan.plan,
                             .gather = true,
                             .input = x.view(),
                             .output = y.view(),
                             .activation = ActivationKind::kRelu},
                            tile, nullptr);
    return y.Fetch();
  };
  for (const cuda::FusedTile tile : {cuda::FusedTile::kMma, cuda::FusedTile::kWarpgroup}) {
    DeviceRows a(4, 64, 64, DType::kF32), b(4, 64, 64, DType::kF32);
    const RowsView expected = run(*up_all, *down_all, tile, a);
    const RowsView found = run(*up_some, *down_some, tile, b);
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(SameBits(expected, found, i, i, 64));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, AbsentExpertsTest, ::testing::ValuesIn(BankFormats()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Formats, AbsentFusedExpertsTest, ::testing::Values(BankFormats()[1]),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing

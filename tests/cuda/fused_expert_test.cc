// The fused expert kernel must have the same bits as the two products that it replaces.

#include "kernels/cuda/fused/fused_expert.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>

#include "kernels/cuda/linear/linear.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

constexpr ActivationKind kExpertKinds[] = {
    ActivationKind::kSilu, ActivationKind::kGelu,  ActivationKind::kGeluTanh, ActivationKind::kRelu,
    ActivationKind::kTanh, ActivationKind::kRelu2, ActivationKind::kNone};

std::vector<std::vector<int>> SomeRoutes(int rows, int experts, Random& random) {
  std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
  for (auto& r : routes) {
    for (int e = 0; e < experts; ++e) {
      // Expert 1 gets no rows.
      if (e != 1 && random.Below(3) == 0) r.push_back(e);
    }
  }
  return routes;
}

// Number of comparisons with each kernel.
int checked[std::size(cuda::kFusedTileNames)] = {};

void CheckAgainstPair(const BankCase& up, const BankCase& down,
                      const std::vector<std::vector<int>>& routes, int spare, DType output_type,
                      const Activation& kind, const std::vector<float>& values) {
  const int width = up.bank->shape().in_features_of(0);
  const auto rows = static_cast<int64_t>(routes.size());
  const DevicePlan plan(up.bank->num_experts(), routes, spare);
  const int64_t n = plan.assignments();
  const int capacity = plan.plan.capacity;
  const std::vector<int>& widths = up.bank->shape().out_features;
  const int widest = (*std::max_element(widths.begin(), widths.end()) + 15) / 16 * 16;
  DeviceRows x(rows, width, width, DType::kBF16, values);
  DeviceRows hidden(capacity, widest, widest, DType::kBF16);
  DeviceRows expected(capacity, width, width, output_type);
  cuda::LaunchLinear({.bank = up.bank.get(),
                      .plan = &plan.plan,
                      .gather = true,
                      .input = x.view(),
                      .output = hidden.view(),
                      .activation = kind,
                      .pad_output = true},
                     nullptr);
  cuda::LaunchLinear({.bank = down.bank.get(),
                      .plan = &plan.plan,
                      .input = hidden.view(),
                      .output = expected.view()},
                     nullptr);
  const RowsView pair = expected.Fetch();
  const auto check = [&](cuda::FusedTile tile, int64_t stride) {
    DeviceRows fused(capacity, width, stride, output_type);
    const cuda::FusedExpertArgs args{.up = up.bank.get(),
                                     .down = down.bank.get(),
                                     .plan = &plan.plan,
                                     .gather = true,
                                     .input = x.view(),
                                     .output = fused.view(),
                                     .activation = kind};
    const std::vector<cuda::FusedTile> tiles = cuda::FusedTilesThatFit(args);
    if (std::find(tiles.begin(), tiles.end(), tile) == tiles.end()) return;
    ++checked[static_cast<size_t>(tile)];
    cuda::LaunchFusedExpert(args, tile, nullptr);
    const RowsView one = fused.Fetch();
    for (int64_t a = 0; a < n; ++a) {
      ASSERT_TRUE(SameBits(one, pair, a, a, width))
          << cuda::kFusedTileNames[static_cast<size_t>(tile)] << ", assignment " << a << " of " << n
          << ", expert " << plan.expert[a] << ", width " << width;
    }
    ASSERT_TRUE(fused.OthersUntouched(n, std::vector<int64_t>(n, width)));
  };
  check(cuda::FusedTile::kMma, width + 1);
  if (::testing::Test::HasFatalFailure()) return;
  // f32 rows may have any alignment.
  const bool aligned = output_type == DType::kBF16 || rows % 2 == 0;
  check(cuda::FusedTile::kWarpgroup, aligned ? width + 16 : width + 1);
}

TEST(FusedExpertTest, HasTheBitsOfThePair) {
  Random random(11);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 200};
  int turn = 0;
  for (const int width : {8, 12, 64, 96, 128, 192, 256}) {
    for (const bool gated : {false, true}) {
      const bool bias = turn % 2 == 0;
      const BankCase up({width}, widths, gated, bias, DType::kBF16, random);
      const BankCase down(widths, std::vector<int>(widths.size(), width), false, bias, DType::kBF16,
                          random);
      ASSERT_TRUE(cuda::FusedExpertFits(*up.bank, *down.bank));
      for (const int rows : {1, 9, 64, 130}) {
        // Covers every tile size, but not for every width.
        if (rows == 130 && turn % 3 != 0) continue;
        CheckAgainstPair(up, down, SomeRoutes(rows, static_cast<int>(widths.size()), random),
                         rows % 5, turn % 2 == 0 ? DType::kF32 : DType::kBF16,
                         gated && turn % 4 == 1 ? GeneralActivation() : kExpertKinds[turn % 5],
                         random.Normals(int64_t{rows} * width));
        if (HasFatalFailure()) return;
      }
      ++turn;
    }
  }
}

// The sums of the second matrix have 2 or 3 slices.
TEST(FusedExpertTest, HasTheSlicesOfThePair) {
  Random random(14);
  const std::vector<int> widths = {1600, 1536, 2304};
  for (const auto& [width, gated] : {std::pair{72, false}, {192, true}}) {
    const BankCase up({width}, widths, gated, true, DType::kBF16, random);
    const BankCase down(widths, std::vector<int>(3, width), false, true, DType::kBF16, random);
    ASSERT_EQ(down.bank->max_slices(), 3);
    for (const int rows : {5, 80}) {
      CheckAgainstPair(up, down, SomeRoutes(rows, 3, random), 2, DType::kF32, ActivationKind::kSilu,
                       random.Normals(int64_t{rows} * width));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(FusedExpertTest, AllRowsToOneExpertAndNone) {
  Random random(12);
  const std::vector<int> widths = {96, 1};
  for (const bool gated : {false, true}) {
    const BankCase up({64}, widths, gated, true, DType::kBF16, random);
    const BankCase down(widths, {64, 64}, false, true, DType::kBF16, random);
    std::vector<float> values = random.Normals(200 * 64);
    CheckAgainstPair(up, down, std::vector<std::vector<int>>(200, {1}), 7, DType::kBF16,
                     ActivationKind::kSilu, values);
    CheckAgainstPair(up, down, std::vector<std::vector<int>>(9), 7, DType::kBF16,
                     ActivationKind::kSilu, random.Normals(9 * 64));
    // A row of NaN and a row with an infinity must not affect other rows, and must equal the
    // results of the two products: the padding of hidden units must not turn the infinity into NaN.
    for (int i = 0; i < 64; ++i) values[3 * 64 + i] = std::numeric_limits<float>::quiet_NaN();
    values[70 * 64] = std::numeric_limits<float>::infinity();
    CheckAgainstPair(up, down, std::vector<std::vector<int>>(200, {0, 1}), 0, DType::kF32,
                     ActivationKind::kRelu, values);
  }
}

// Routes to five experts: expert 0 has one row, 1 none, 2 few, the others more than a tile of 128.
std::vector<std::vector<int>> UnevenRoutes() {
  std::vector<std::vector<int>> routes(260);
  for (int r = 0; r < 260; ++r) {
    if (r == 100) routes[r].push_back(0);
    if (r % 5 == 0) routes[r].push_back(2);
    routes[r].push_back(3);
    if (r % 2 == 0) routes[r].push_back(4);
  }
  return routes;
}

bool HasWarpgroupKernel() {
  int major = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  return major == 9;
}

// In tiles of at most 64 rows, only one warpgroup computes. The last expert has no hidden units.
TEST(FusedExpertTest, WarpgroupsHaveTheBitsOfThePair) {
  if (!HasWarpgroupKernel()) GTEST_SKIP() << "wgmma needs compute capability 9.0";
  constexpr ActivationKind kKinds[] = {ActivationKind::kGelu, ActivationKind::kSilu,
                                       ActivationKind::kRelu, ActivationKind::kGeluTanh};
  Random random(15);
  int turn = 0;
  for (const int width : {64, 96, 128, 192, 256}) {
    for (const bool gated : {false, true}) {
      const std::vector<int> widths = {100, 40, 33, 130, 0};
      const BankCase up({width}, widths, gated, true, DType::kBF16, random);
      const BankCase down(widths, std::vector<int>(5, width), false, true, DType::kBF16, random);
      const int before = checked[static_cast<int>(cuda::FusedTile::kWarpgroup)];
      CheckAgainstPair(up, down, UnevenRoutes(), 3, turn % 2 == 0 ? DType::kF32 : DType::kBF16,
                       kKinds[turn % 4], random.Normals(int64_t{260} * width));
      if (HasFatalFailure()) return;
      EXPECT_EQ(checked[static_cast<int>(cuda::FusedTile::kWarpgroup)], before + 1);
      turn += 3;
    }
  }
}

// Slices of several lengths, in the registers and the shared memory that each width has.
TEST(FusedExpertTest, WarpgroupsHaveTheSlicesOfThePair) {
  if (!HasWarpgroupKernel()) GTEST_SKIP() << "wgmma needs compute capability 9.0";
  struct Scene {
    int width;
    bool gated;
    std::vector<int> widths;
    int rows;
  };
  const Scene scenes[] = {
      {64, false, {1536, 12288}, 5}, {64, true, {1600, 1536}, 70},   {128, false, {3072, 1536}, 70},
      {128, true, {1536, 1600}, 5},  {192, false, {3024, 3072}, 70}, {192, true, {3024, 1536}, 5},
      {256, false, {3072, 1600}, 5}, {256, true, {1536, 2100}, 70},
  };
  Random random(16);
  int turn = 0;
  for (const Scene& s : scenes) {
    const BankCase up({s.width}, s.widths, s.gated, true, DType::kBF16, random);
    const BankCase down(s.widths, {s.width, s.width}, false, true, DType::kBF16, random);
    ASSERT_GT(down.bank->max_slices(), 1);
    const int before = checked[static_cast<int>(cuda::FusedTile::kWarpgroup)];
    std::vector<std::vector<int>> routes(static_cast<size_t>(s.rows), {0});
    routes[1].push_back(1);
    CheckAgainstPair(up, down, routes, 1, turn++ % 2 == 0 ? DType::kF32 : DType::kBF16,
                     s.gated ? ActivationKind::kSilu : ActivationKind::kGelu,
                     random.Normals(int64_t{s.rows} * s.width));
    if (HasFatalFailure()) return;
    EXPECT_EQ(checked[static_cast<int>(cuda::FusedTile::kWarpgroup)], before + 1);
  }
}

// Rows in the order of their experts, and rows of the only expert without a plan.
TEST(FusedExpertTest, RowsThatAreNotGathered) {
  Random random(17);
  const int width = 192;
  for (const bool routed : {true, false}) {
    const std::vector<int> widths = routed ? std::vector<int>{130, 64} : std::vector<int>{130};
    const auto experts = static_cast<int>(widths.size());
    const BankCase up({width}, widths, false, true, DType::kBF16, random);
    const BankCase down(widths, std::vector<int>(widths.size(), width), false, true, DType::kBF16,
                        random);
    std::vector<std::vector<int>> routes(150, {0});
    for (int r = 0; r < 20; ++r) routes[r] = {experts - 1};
    const DevicePlan plan(experts, routes, 0);
    DeviceRows x(150, width, width, DType::kBF16, random.Normals(int64_t{150} * width));
    DeviceRows hidden(150, 144, 144, DType::kBF16);
    DeviceRows expected(150, width, width, DType::kF32);
    const RoutingPlan* const given = routed ? &plan.plan : nullptr;
    cuda::LaunchLinear({.bank = up.bank.get(),
                        .plan = given,
                        .input = x.view(),
                        .output = hidden.view(),
                        .activation = ActivationKind::kRelu,
                        .pad_output = true},
                       nullptr);
    cuda::LaunchLinear(
        {.bank = down.bank.get(), .plan = given, .input = hidden.view(), .output = expected.view()},
        nullptr);
    const RowsView pair = expected.Fetch();
    for (const cuda::FusedTile tile : {cuda::FusedTile::kMma, cuda::FusedTile::kWarpgroup}) {
      DeviceRows fused(150, width, width, DType::kF32);
      cuda::LaunchFusedExpert({.up = up.bank.get(),
                               .down = down.bank.get(),
                               .plan = given,
                               .input = x.view(),
                               .output = fused.view(),
                               .activation = ActivationKind::kRelu},
                              tile, nullptr);
      const RowsView one = fused.Fetch();
      for (int a = 0; a < 150; ++a) ASSERT_TRUE(SameBits(one, pair, a, a, width)) << a;
    }
  }
}

// Wgmma pays for many rows in many tiles; mma.sync for many experts of some rows each.
TEST(FusedExpertTest, PaysWhereItIsExpectedTo) {
  Random random(18);
  const auto pays = [&](int experts, int rows_per_expert, bool gated,
                        const Activation& activation) {
    const std::vector<int> hidden(static_cast<size_t>(experts), 8);
    const BankCase up({64}, hidden, gated, false, DType::kBF16, random);
    const BankCase down(hidden, std::vector<int>(hidden.size(), 64), false, false, DType::kBF16,
                        random);
    RoutingPlan plan;
    plan.num_experts = experts;
    plan.capacity = 2 * experts * rows_per_expert;
    plan.expected = experts * rows_per_expert;
    const RowsView rows{nullptr, DType::kBF16, plan.capacity, 64, 64};
    return cuda::FusedTileThatPays({.up = up.bank.get(),
                                    .down = down.bank.get(),
                                    .plan = &plan,
                                    .gather = true,
                                    .input = rows,
                                    .output = rows,
                                    .activation = activation});
  };
  const std::optional<cuda::FusedTile> wgmma =
      HasWarpgroupKernel() ? std::optional(cuda::FusedTile::kWarpgroup) : std::nullopt;
  EXPECT_EQ(pays(8, 1024, false, ActivationKind::kGelu), wgmma);
  EXPECT_EQ(pays(8, 1024, true, ActivationKind::kSilu), wgmma);
  EXPECT_EQ(pays(8, 512, false, ActivationKind::kGelu), std::nullopt);
  EXPECT_EQ(pays(8, 1024, false, ActivationKind::kTanh), std::nullopt);
  EXPECT_EQ(pays(8, 1024, true, GeneralActivation()), std::nullopt);
  EXPECT_EQ(pays(128, 64, false, ActivationKind::kGelu), wgmma);
  EXPECT_EQ(pays(128, 16, false, ActivationKind::kTanh), cuda::FusedTile::kMma);
  EXPECT_EQ(pays(128, 16, true, ActivationKind::kSilu), std::nullopt);
}

TEST(FusedExpertTest, FitsNarrowBf16ExpertsOnly) {
  Random random(13);
  const auto fits = [&](int in, int hidden, int out, DType type, bool down_gated) {
    const BankCase up({in}, {hidden}, true, false, type, random);
    const BankCase down({hidden}, {out}, down_gated, false, type, random);
    return cuda::FusedExpertFits(*up.bank, *down.bank);
  };
  EXPECT_TRUE(fits(256, 3, 256, DType::kBF16, false));
  EXPECT_FALSE(fits(257, 3, 257, DType::kBF16, false));
  EXPECT_FALSE(fits(64, 3, 64, DType::kF32, false));
  EXPECT_FALSE(fits(64, 3, 32, DType::kBF16, false));
  EXPECT_FALSE(fits(64, 3, 64, DType::kBF16, true));
}

}  // namespace
}  // namespace moeserve::testing

// The fused expert kernel must have the same bits as the two products that it replaces.

#include "kernels/cuda/linear/fused_expert.h"

#include <gtest/gtest.h>

#include <limits>

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
  DeviceRows fused(capacity, width, width + 1, output_type);
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
  cuda::LaunchFusedExpert({.up = up.bank.get(),
                           .down = down.bank.get(),
                           .plan = &plan.plan,
                           .gather = true,
                           .input = x.view(),
                           .output = fused.view(),
                           .activation = kind},
                          nullptr);
  const RowsView pair = expected.Fetch();
  const RowsView one = fused.Fetch();
  for (int64_t a = 0; a < n; ++a) {
    ASSERT_TRUE(SameBits(one, pair, a, a, width))
        << "assignment " << a << " of " << n << ", expert " << plan.expert[a] << ", width "
        << width;
  }
  ASSERT_TRUE(fused.OthersUntouched(n, std::vector<int64_t>(n, width)));
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

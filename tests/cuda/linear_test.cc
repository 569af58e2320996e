// The device's linear kernels compared with double arithmetic, and their guarantees about bits.

#include "kernels/cuda/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::LaunchLinear;
using cuda::LinearTile;

struct Types {
  DType rows;
  DType weights;
};
constexpr Types kLinearTypes[] = {{DType::kF32, DType::kF32},
                                  {DType::kF32, DType::kBF16},
                                  {DType::kF32, DType::kF16},
                                  {DType::kBF16, DType::kBF16}};
// With the test's values, sums of n products are about 1, and activations do not increase their
// argument. So the tolerance is the rounding error of the sums, relative to 1, plus that of the
// result.
::testing::AssertionResult SumsNear(const std::vector<double>& actual,
                                    const std::vector<double>& expected, const Types& t, DType out,
                                    int64_t n) {
  const double sums = 8 * std::sqrt(static_cast<double>(n) + 1) * Epsilon(DType::kF32) +
                      (t.rows == DType::kBF16 ? 1e-5 : 0.0);
  for (size_t i = 0; i < expected.size(); ++i) {
    const double bound =
        sums * (1 + std::abs(expected[i])) + 2 * Epsilon(out) * std::abs(expected[i]);
    if (!(std::abs(actual[i] - expected[i]) <= bound)) {
      return ::testing::AssertionFailure() << "element " << i << " of " << expected.size() << ": "
                                           << actual[i] << " instead of " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(CudaLinearTest, DenseMatchesDoubleArithmetic) {
  Random random(1);
  for (const Types& t : kLinearTypes) {
    for (const auto& [rows, in, out] : std::vector<std::tuple<int, int, int>>{{1, 1, 1},
                                                                              {2, 3, 5},
                                                                              {7, 16, 16},
                                                                              {8, 33, 17},
                                                                              {9, 64, 63},
                                                                              {63, 24, 65},
                                                                              {64, 128, 96},
                                                                              {65, 250, 130},
                                                                              {200, 31, 320}}) {
      for (const bool bias : {false, true}) {
        const DType out_type = bias ? t.rows : DType::kF32;
        const BankCase bank({in}, {out}, false, bias, t.weights, random);
        DeviceRows x(rows, in, in, t.rows, random.Normals(int64_t{rows} * in));
        DeviceRows y(rows, out, out + 3, out_type);
        LaunchLinear({.bank = bank.bank.get(), .input = x.view(), .output = y.view()}, nullptr);
        const RowsView result = y.Fetch();
        const RowsView input = x.Fetch();
        for (int r = 0; r < rows; ++r) {
          ASSERT_TRUE(SumsNear(RowOf(result, r, out),
                               bank.Expected(0, RowOf(input, r, in), ActivationKind::kNone), t,
                               out_type, in))
              << Name(t.rows) << " x " << Name(t.weights) << ", " << rows << " x " << in << " x "
              << out << ", row " << r;
        }
        ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, out)));
      }
    }
  }
}

// Returns routings of all rows to the first expert, to the last, to every expert, to some experts,
// and to none.
std::vector<std::vector<std::vector<int>>> AdversarialRoutings(int rows, int experts,
                                                               Random& random) {
  std::vector<std::vector<int>> first(rows, {0}), last(rows, {experts - 1}), every(rows),
      some(rows), none(rows);
  for (int r = 0; r < rows; ++r) {
    for (int e = 0; e < experts; ++e) {
      every[r].push_back(e);
      if (random.Below(3) == 0) some[r].push_back(e);
    }
  }
  return {first, last, every, some, none};
}

// Computes `rows` rows of width `model` with the experts' two matrices, and checks both products.
void CheckExperts(const Types& t, const BankCase& up, const BankCase& down, int model, int rows,
                  const std::vector<std::vector<int>>& routing, int spare, const Activation& kind,
                  LinearTile tile, Random& random) {
  const int experts = up.bank->num_experts();
  const DevicePlan plan(experts, routing, spare);
  const int64_t n = plan.assignments();
  const int widest =
      *std::max_element(up.bank->shape().out_features.begin(), up.bank->shape().out_features.end());
  DeviceRows x(rows, model, model, t.rows, random.Normals(int64_t{rows} * model));
  DeviceRows hidden(plan.plan.capacity, widest, RoundUp16(widest), t.rows);
  DeviceRows results(plan.plan.capacity, model, model, t.rows);
  LaunchLinear({.bank = up.bank.get(),
                .plan = &plan.plan,
                .gather = true,
                .input = x.view(),
                .output = hidden.view(),
                .activation = kind,
                .pad_output = true},
               tile, nullptr);
  LaunchLinear({.bank = down.bank.get(),
                .plan = &plan.plan,
                .input = hidden.view(),
                .output = results.view()},
               tile, nullptr);
  const RowsView input = x.Fetch();
  const RowsView middle = hidden.Fetch();
  const RowsView output = results.Fetch();
  std::vector<int64_t> written;
  for (int64_t a = 0; a < n; ++a) {
    const int e = plan.expert[a];
    const int width = up.bank->shape().out_features[e];
    written.push_back(RoundUp16(width));
    // Check a sample of the rows, and all rows near the edges of tiles.
    if (n > 40 && a % 7 != 0 && a % 64 > 1 && a % 64 < 62) continue;
    const std::vector<double> h = RowOf(middle, a, width);
    ASSERT_TRUE(
        SumsNear(h, up.Expected(e, RowOf(input, plan.row[a], model), kind), t, t.rows, model))
        << "hidden, assignment " << a << " of " << n << ", expert " << e << ", width " << model;
    for (const double v : RowOf(middle, a, RoundUp16(width))) ASSERT_FALSE(std::isnan(v));
    ASSERT_TRUE(SumsNear(RowOf(output, a, model), down.Expected(e, h, ActivationKind::kNone), t,
                         t.rows, width))
        << "results, assignment " << a << " of " << n << ", expert " << e << ", width " << model;
  }
  ASSERT_TRUE(hidden.OthersUntouched(n, written));
  ASSERT_TRUE(results.OthersUntouched(n, std::vector<int64_t>(n, model)));
}

TEST(CudaLinearTest, UnequalExpertsMatchDoubleArithmetic) {
  Random random(3);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 200};
  const int experts = static_cast<int>(widths.size());
  const Activation kinds[] = {ActivationKind::kSilu,     ActivationKind::kGelu,
                              ActivationKind::kGeluTanh, ActivationKind::kRelu,
                              ActivationKind::kTanh,     ActivationKind::kRelu2,
                              ActivationKind::kNone,     GeneralActivation()};
  constexpr int kRows[] = {1, 2, 7, 8, 9, 63, 64, 65};
  int turn = 0;
  for (const Types& t : kLinearTypes) {
    for (const int model : {8, 12, 64, 96, 128, 192, 256}) {
      const bool gated = turn % 3 != 0;
      const BankCase up({model}, widths, gated, turn % 2 == 0, t.weights, random);
      const BankCase down(widths, std::vector<int>(widths.size(), model), false, turn % 2 == 0,
                          t.weights, random);
      for (int i = 0; i < 3; ++i, ++turn) {
        const int rows = kRows[turn % 8];
        const auto routings = AdversarialRoutings(rows, experts, random);
        CheckExperts(t, up, down, model, rows, routings[turn % 5], turn % 4 * 13, kinds[turn % 6],
                     turn % 2 == 0 ? LinearTile::kAuto : kTiles[turn % std::size(kTiles)], random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CudaLinearTest, ManyRowsOfOneExpert) {
  Random random(4);
  const std::vector<int> widths = {24, 3, 130};
  const BankCase up({64}, widths, true, true, DType::kBF16, random);
  const BankCase down(widths, {64, 64, 64}, false, true, DType::kBF16, random);
  for (const LinearTile tile : kTiles) {
    CheckExperts({DType::kBF16, DType::kBF16}, up, down, 64, 200,
                 std::vector<std::vector<int>>(200, {2}), 5, ActivationKind::kSilu, tile, random);
    if (HasFatalFailure()) return;
  }
}

// A bank of several experts with many inputs and few outputs sums in slices: its results are the
// sums of the slices in ascending order, computed as products of their own.
TEST(CudaLinearTest, SlicesAreAddedInOrder) {
  Random random(14);
  const std::vector<int> in = {1536, 2304, 3080, 5888}, out = {24, 70, 64, 17};
  const std::vector<int> rows = {40, 1, 9, 0};  // of the experts, one after another
  const BankCase bank(in, out, false, true, DType::kBF16, random);
  ASSERT_EQ(bank.bank->max_slices(), 6);
  std::vector<std::vector<int>> routes;
  for (int e = 0; e < 4; ++e) {
    for (int r = 0; r < rows[e]; ++r) routes.push_back({e});
  }
  const int n = static_cast<int>(routes.size());
  const DevicePlan plan(4, routes, 3);
  DeviceRows x(plan.plan.capacity, 5888, 5888, DType::kBF16, random.Normals(int64_t{n + 3} * 5888));

  std::vector<std::vector<float>> expected;  // [row][out]
  int first = 0;
  for (int e = 0; e < 4; first += rows[e++]) {
    if (rows[e] == 0) continue;
    const int length = bank.bank->entry(e).slice_blocks * cuda::kImageBlock;
    std::vector<std::vector<float>> sums(rows[e], std::vector<float>(out[e], 0.0f));
    for (int begin = 0; begin < in[e]; begin += length) {
      const int inputs = std::min(length, in[e] - begin);
      auto slice =
          std::move(cuda::CudaLinearBank::Create({{inputs}, {out[e]}, false, false, DType::kBF16}))
              .value();
      std::vector<float> weights;
      for (const std::vector<double>& row : bank.main[e]) {
        for (int k = 0; k < inputs; ++k) weights.push_back(static_cast<float>(row[begin + k]));
      }
      slice->LoadWeight(0, LinearBank::Half::kMain, 0,
                        MakeTensor(weights, {out[e], inputs}, DType::kBF16));
      RowsView view = x.view();
      view.rows = rows[e];
      view.cols = inputs;
      view.data = static_cast<char*>(view.data) + (int64_t{first} * view.stride + begin) * 2;
      DeviceRows y(rows[e], out[e], out[e], DType::kF32);
      LaunchLinear({.bank = slice.get(), .input = view, .output = y.view()}, LinearTile::kRows8,
                   nullptr);
      const RowsView result = y.Fetch();
      for (int r = 0; r < rows[e]; ++r) {
        const float* values = reinterpret_cast<const float*>(result.row(r));
        for (int c = 0; c < out[e]; ++c) sums[r][c] += values[c];
      }
    }
    for (std::vector<float>& row : sums) {
      for (int c = 0; c < out[e]; ++c) row[c] += static_cast<float>(bank.main_bias[e][c]);
      expected.push_back(row);
    }
  }
  for (const LinearTile tile : kTiles) {
    DeviceRows y(plan.plan.capacity, 70, 72, DType::kF32);
    LaunchLinear(
        {.bank = bank.bank.get(), .plan = &plan.plan, .input = x.view(), .output = y.view()}, tile,
        nullptr);
    const RowsView result = y.Fetch();
    for (int r = 0; r < n; ++r) {
      ASSERT_EQ(std::memcmp(result.row(r), expected[r].data(), expected[r].size() * 4), 0)
          << "tile " << static_cast<int>(tile) << ", row " << r;
    }
  }
}

TEST(CudaLinearTest, OnlyLongSumsOfFewOutputsHaveSlices) {
  const auto slices = [](std::vector<int> in, std::vector<int> out, DType dtype = DType::kBF16) {
    return cuda::SliceBlocks({std::move(in), std::move(out), false, false, dtype});
  };
  EXPECT_EQ(slices({3072}, {192, 192}), (std::vector<int>{16, 16}));
  EXPECT_EQ(slices({2304, 5888}, {1024, 1024}), (std::vector<int>{12, 16}));
  // Experts without a matrix do not count.
  EXPECT_EQ(slices({1536, 64}, {1024, 0}), (std::vector<int>{12, 1}));
  EXPECT_EQ(slices({1535, 5888}, {1024, 1024}), (std::vector<int>{24, 92}));
  EXPECT_EQ(slices({3072}, {192, 1025}), (std::vector<int>{48, 48}));
  EXPECT_EQ(slices({3072}, {192}), (std::vector<int>{48}));
  EXPECT_EQ(slices({3072}, {192, 192}, DType::kF32), (std::vector<int>{48, 48}));
}

// More experts than the lanes that search for a tile's expert handle at once.
TEST(CudaLinearTest, ManyExperts) {
  Random random(5);
  for (const int experts : {31, 129, 300}) {
    std::vector<int> widths;
    for (int e = 0; e < experts; ++e) widths.push_back(1 + random.Below(20));
    const BankCase up({16}, widths, true, false, DType::kBF16, random);
    const BankCase down(widths, std::vector<int>(widths.size(), 16), false, false, DType::kBF16,
                        random);
    std::vector<std::vector<int>> routing(12);
    for (auto& r : routing) {
      for (int i = 0; i < 3; ++i) r.push_back(random.Below(experts));
    }
    CheckExperts({DType::kBF16, DType::kBF16}, up, down, 16, 12, routing, 3, ActivationKind::kSilu,
                 LinearTile::kAuto, random);
    if (HasFatalFailure()) return;
  }
}

// More tiles than the device has multiprocessors, so that persistent blocks compute several tiles,
// with few and with many stages, full and partial.
TEST(CudaLinearTest, ManyTiles) {
  Random random(9);
  std::vector<int> widths;
  for (int e = 0; e < 80; ++e) widths.push_back(1 + random.Below(300));
  const BankCase up({24}, widths, false, true, DType::kBF16, random);
  const BankCase down(widths, std::vector<int>(widths.size(), 24), false, true, DType::kBF16,
                      random);
  std::vector<std::vector<int>> routing(70);
  for (size_t r = 0; r < routing.size(); ++r) {
    for (int e = 0; e < 80; ++e) {
      if (e < 4 || (r < 3 && e % 3 != 0)) routing[r].push_back(e);
    }
  }
  std::vector<std::vector<int>> few(3);
  for (auto& r : few) {
    for (int e = 0; e < 80; ++e) r.push_back(e);
  }
  for (const LinearTile tile : kWarpgroupTiles) {
    for (const auto& routes : {routing, few}) {
      CheckExperts({DType::kBF16, DType::kBF16}, up, down, 24, static_cast<int>(routes.size()),
                   routes, 3, ActivationKind::kGelu, tile, random);
      if (HasFatalFailure()) return;
    }
  }
}

// A row's bits must be the same alone and with other rows, and NaN and Inf must stay in their rows.
TEST(CudaLinearTest, RowsDoNotInfluenceEachOther) {
  Random random(6);
  for (const Types& t : kLinearTypes) {
    const int in = 72, out = 150;
    const BankCase bank({in}, {out}, false, false, t.weights, random);
    std::vector<float> values = random.Normals(int64_t{300} * in);
    for (int i = 0; i < in; ++i) {
      values[5 * in + i] = std::numeric_limits<float>::quiet_NaN();
      values[77 * in + i] = std::numeric_limits<float>::infinity();
    }
    values[4 * in + 3] = std::numeric_limits<float>::infinity();
    DeviceRows x(300, in, in, t.rows, values);
    DeviceRows together(300, out, out, DType::kF32);
    LaunchLinear({.bank = bank.bank.get(), .input = x.view(), .output = together.view()}, nullptr);
    const RowsView all = together.Fetch();
    for (const int r : {0, 4, 5, 6, 76, 78, 299}) {
      RowsView one = x.view();
      one.data = x.view().row(r);
      one.rows = 1;
      DeviceRows alone(1, out, out, DType::kF32);
      LaunchLinear({.bank = bank.bank.get(), .input = one, .output = alone.view()}, nullptr);
      ASSERT_TRUE(SameBits(alone.Fetch(), all, 0, r, out)) << "row " << r;
      const float first = reinterpret_cast<const float*>(all.row(r))[0];
      ASSERT_EQ(std::isnan(first), r == 5);
      ASSERT_EQ(std::isinf(first), r == 4);
    }
    RowsView some = x.view();
    some.rows = 20;
    DeviceRows fewer(20, out, out, DType::kF32);
    LaunchLinear({.bank = bank.bank.get(), .input = some, .output = fewer.view()}, nullptr);
    const RowsView result = fewer.Fetch();
    for (int r = 0; r < 20; ++r) ASSERT_TRUE(SameBits(result, all, r, r, out)) << "row " << r;
  }
}

// Multiplying by the identity must return f32 rows bit by bit: tensor cores must not round away any
// part of them.
TEST(CudaLinearTest, RowsKeepTheirPrecision) {
  Random random(15);
  const int n = 70;
  std::vector<float> identity(n * n, 0.0f);
  for (int i = 0; i < n; ++i) identity[i * n + i] = 1.0f;
  auto bank =
      std::move(cuda::CudaLinearBank::Create({{n}, {n}, false, false, DType::kBF16})).value();
  bank->LoadWeight(0, LinearBank::Half::kMain, 0, MakeTensor(identity, {n, n}, DType::kBF16));
  for (const int rows : {3, 30, 90}) {
    DeviceRows x(rows, n, n, DType::kF32, random.Normals(int64_t{rows} * n));
    DeviceRows y(rows, n, n, DType::kF32);
    LaunchLinear({.bank = bank.get(), .input = x.view(), .output = y.view()}, nullptr);
    const RowsView result = y.Fetch();
    const RowsView input = x.Fetch();
    for (int r = 0; r < rows; ++r) ASSERT_TRUE(SameBits(result, input, r, r, n));
  }
}

// Padding columns must be zero even for a row of NaN.
TEST(CudaLinearTest, PaddingIsZero) {
  Random random(10);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Types& t : kLinearTypes) {
    for (const bool gated : {false, true}) {
      const BankCase bank({8}, {19}, gated, true, t.weights, random);
      DeviceRows x(3, 8, 8, t.rows, std::vector<float>(24, nan));
      DeviceRows y(3, 32, 40, t.rows);
      LaunchLinear({.bank = bank.bank.get(),
                    .input = x.view(),
                    .output = y.view(),
                    .activation = ActivationKind::kGelu,
                    .pad_output = true},
                   nullptr);
      const RowsView result = y.Fetch();
      for (int r = 0; r < 3; ++r) {
        const std::vector<double> row = RowOf(result, r, 32);
        for (int c = 0; c < 19; ++c) ASSERT_TRUE(std::isnan(row[c]));
        for (int c = 19; c < 32; ++c) ASSERT_EQ(row[c], 0.0);
      }
      ASSERT_TRUE(y.OthersUntouched(3, {32, 32, 32}));
    }
  }
}

// Layers wide enough for the wider of the two tiles of 64 rows, and for groups of 8 full blocks of
// 64 outputs.
TEST(CudaLinearTest, WideLayers) {
  Random random(14);
  const int in = 8, out = 100 * 128 - 40;
  const BankCase bank({in}, {out}, false, false, DType::kBF16, random);
  const std::vector<float> values = random.Normals(65 * in);
  DeviceRows x(65, in, in, DType::kBF16, values);
  DeviceRows expected(65, out, out, DType::kBF16);
  LaunchLinear({.bank = bank.bank.get(), .input = x.view(), .output = expected.view()},
               LinearTile::kRows128, nullptr);
  const RowsView all = expected.Fetch();
  for (const int r : {0, 63, 64}) {
    ASSERT_TRUE(SumsNear(RowOf(all, r, out),
                         bank.Expected(0, RowOf(x.Fetch(), r, in), ActivationKind::kNone),
                         {DType::kBF16, DType::kBF16}, DType::kBF16, in));
  }
  for (const LinearTile tile : {LinearTile::kRows8, LinearTile::kRows64}) {
    for (const int rows : {8, 65}) {
      RowsView first = x.view();
      first.rows = rows;
      DeviceRows y(rows, out, out, DType::kBF16);
      LaunchLinear({.bank = bank.bank.get(), .input = first, .output = y.view()}, tile, nullptr);
      const RowsView result = y.Fetch();
      for (int r = 0; r < rows; ++r) ASSERT_TRUE(SameBits(result, all, r, r, out));
    }
  }
}

TEST(CudaLinearTest, NoRowsWriteNothing) {
  Random random(7);
  const BankCase bank({16, 16}, {8, 24}, false, false, DType::kBF16, random);
  const DevicePlan plan(2, {}, 0);
  DeviceRows x(0, 16, 16, DType::kBF16);
  DeviceRows y(0, 24, 32, DType::kBF16);
  LaunchLinear({.bank = bank.bank.get(),
                .plan = &plan.plan,
                .gather = true,
                .input = x.view(),
                .output = y.view()},
               nullptr);
  y.Fetch();
  EXPECT_TRUE(y.OthersUntouched(0, {}));
}

TEST(CudaLinearTest, ReadsRowsOfTheImage) {
  Random random(8);
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const BankCase bank({70}, {100}, false, false, type, random);
    const std::vector<int32_t> ids = {0, 99, 64, 63, 7, 7, -1};
    const cuda::DeviceMemory device_ids = Upload(ids.data(), ids.size() * sizeof(int32_t));
    DeviceRows y(static_cast<int64_t>(ids.size()), 70, 75, DType::kF32);
    cuda::LaunchReadRows(*bank.bank, device_ids.as<int32_t>(), static_cast<int>(ids.size()), 2.0f,
                         y.view(), nullptr);
    const RowsView result = y.Fetch();
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int k = 0; k < 70; ++k) {
        ASSERT_EQ(reinterpret_cast<const float*>(result.row(static_cast<int64_t>(i)))[k],
                  2.0 * bank.main[0][std::max(ids[i], 0)][k]);
      }
    }
    ASSERT_TRUE(y.OthersUntouched(7, std::vector<int64_t>(7, 70)));
  }
}

}  // namespace
}  // namespace moeserve::testing

// Weights of type int8-channel on the device: their image, the rounding of input rows, and products
// with the bits of the CPU backend.

#include "kernels/cuda/quantized/linear_int8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/linear/linear_image.h"
#include "tests/cuda/integer_case.h"

namespace moeserve::testing {
namespace {

using cuda::CudaLinearBank;
using cuda::LinearTile;
using Half = LinearBank::Half;

constexpr Quantization kType = Quantization::kInt8Channel;
constexpr DType kRowTypes[] = {DType::kF32, DType::kBF16};

struct BankPair : IntegerBankPair {
  BankPair(std::vector<int> in, std::vector<int> out, bool gated, bool bias, Random& random)
      : IntegerBankPair(kType, std::move(in), std::move(out), gated, bias, random) {}
};

void Launch(const LinearArgs& args, LinearTile tile) {
  cuda::Int8Rows rows;
  ASSERT_TRUE(rows.MustGrow(args));
  ASSERT_TRUE(rows.Reserve(args).ok());
  ASSERT_FALSE(rows.MustGrow(args));
  cuda::LaunchLinearInt8(args, tile, rows, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(LinearInt8Test, EachIntegerHasItsPlaceInTheImage) {
  constexpr int kIn = 300, kOut = 70;
  for (const bool gated : {false, true}) {
    const auto bank =
        std::move(CudaLinearBank::Create({{kIn}, {kOut}, gated, false, DType::kBF16, kType}))
            .value();
    const cuda::LinearBankEntry& m = bank->entry(0);
    EXPECT_EQ(m.k_blocks, 3);
    EXPECT_EQ(m.row_blocks, gated ? 3 : 2);
    const int packed_rows = m.row_blocks * 64;
    EXPECT_EQ(bank->bytes(), packed_rows * (3 * 128 + 4));
    Random random(1);
    std::vector<int8_t> expected(static_cast<size_t>(packed_rows) * 384, 0);
    std::vector<float> scales(static_cast<size_t>(packed_rows), 0.0f);
    for (const bool gate : {false, true}) {
      if (gate && !gated) continue;
      const IntegerWeight w = MakeWeight(random, kType, kOut, kIn);
      bank->LoadQuantized(0, gate ? Half::kGate : Half::kMain, 0, w.integers);
      for (int r = 0; r < kOut; ++r) {
        // Eight rows of the gate and eight of the other half alternate.
        const int row = !gated ? r : r / 8 * 16 + (gate ? 0 : 8) + r % 8;
        scales[row] = F32FromF16(w.integers.scales[r]);
        for (int k = 0; k < kIn; ++k) {
          // Blocks of 64 x 128; piece c of a row is at c ^ (row % 8).
          const int block = row / 64 * 3 + k / 128;
          const int at = block * 8192 + row % 64 * 128 + (k % 128 / 16 ^ row % 8) * 16 + k % 16;
          expected[at] = static_cast<int8_t>(w.integers.value(r, k));
          EXPECT_EQ(cuda::Int8ImageOffset(3, row, k), at);
        }
      }
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<char> image = ReadDevice(bank->weights(), expected.size());
    EXPECT_EQ(std::memcmp(image.data(), expected.data(), image.size()), 0);
    const std::vector<char> loaded = ReadDevice(bank->scales(), scales.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(loaded.data(), scales.data(), loaded.size()), 0);
  }
}

TEST(LinearInt8Test, LongRowsAreRefusedAndSumsHaveOneSlice) {
  EXPECT_TRUE(absl::IsUnimplemented(
      CudaLinearBank::Create({{kWholeRow + 1}, {64}, false, false, DType::kBF16, kType}).status()));
  // Integers are summed without slices, whatever the shape.
  EXPECT_EQ(cuda::SliceBlocks({{3072}, {192, 192}, false, false, DType::kBF16, kType}),
            (std::vector<int>{24, 24}));
}

// Checks rounded row `at` against the host's rounding of `inputs` values.
void CheckRounded(const std::vector<char>& values, const std::vector<char>& scales, int64_t at,
                  int64_t row_bytes, const std::vector<double>& row, int inputs) {
  std::vector<int8_t> expected(static_cast<size_t>((inputs + 127) / 128 * 128), 0);
  const float scale = RoundRowToInt8(
      inputs, [&](int64_t i) { return static_cast<float>(row[static_cast<size_t>(i)]); },
      expected.data());
  ASSERT_EQ(std::memcmp(values.data() + at * row_bytes, expected.data(), expected.size()), 0)
      << "row " << at;
  ASSERT_EQ(std::memcmp(scales.data() + at * 4, &scale, 4), 0) << "row " << at;
}

TEST(LinearInt8Test, RowsAreRoundedAsOnTheHost) {
  Random random(2);
  for (const DType dtype : kRowTypes) {
    for (const auto& [rows, in, gap] : std::vector<std::tuple<int, int, int>>{{1, 1, 7},
                                                                              {7, 8, 0},
                                                                              {9, 100, 3},
                                                                              {17, 128, 8},
                                                                              {6, 1000, 1},
                                                                              {6, 1032, 8},
                                                                              {7, 2500, 0},
                                                                              {1, 4100, 4}}) {
      const auto bank =
          std::move(CudaLinearBank::Create({{in}, {8}, false, false, DType::kBF16, kType})).value();
      DeviceRows x(rows, in, in + gap, dtype, SomeRows(random, rows, in));
      const LinearArgs args{.bank = bank.get(), .input = x.view(), .output = {}};
      const RoundedCase rounded(args, rows);
      const RowsView input = x.Fetch();
      for (int r = 0; r < rows; ++r) {
        CheckRounded(rounded.values, rounded.scales, r, cuda::Int8RowBytes(args),
                     RowOf(input, r, in), in);
        ASSERT_FALSE(HasFatalFailure()) << Name(dtype) << ", " << rows << " x " << in;
      }
    }
  }
}

// The hidden units of experts of several widths: columns beyond a width are NaN, and so are rows
// without an assignment.
TEST(LinearInt8Test, HiddenRowsAreRoundedToTheWidthOfTheirExpert) {
  Random random(3);
  for (const int widest : {200, 1500}) {
    const std::vector<int> widths = {1, 33, widest, 128, 16};
    const auto bank = std::move(CudaLinearBank::Create(
                                    {widths, {8, 8, 8, 8, 8}, false, false, DType::kBF16, kType}))
                          .value();
    std::vector<std::vector<int>> routes;
    for (int r = 0; r < 23; ++r) routes.push_back({r % 5, (r + 2) % 5});
    const DevicePlan plan(5, routes, 9);
    for (const DType dtype : kRowTypes) {
      DeviceRows x(plan.plan.capacity, widest, widest, dtype);
      std::vector<float> values(static_cast<size_t>(plan.plan.capacity * widest), NAN);
      for (int a = 0; a < plan.assignments(); ++a) {
        const std::vector<float> row = random.Normals(widths[plan.expert[a]]);
        std::copy(row.begin(), row.end(), values.begin() + int64_t{a} * widest);
      }
      x = DeviceRows(plan.plan.capacity, widest, widest, dtype, values);
      const LinearArgs args{
          .bank = bank.get(), .plan = &plan.plan, .input = x.view(), .output = {}};
      const RoundedCase rounded(args, plan.plan.capacity);
      const RowsView input = x.Fetch();
      for (int a = 0; a < plan.assignments(); ++a) {
        const int inputs = widths[plan.expert[a]];
        CheckRounded(rounded.values, rounded.scales, a, cuda::Int8RowBytes(args),
                     RowOf(input, a, inputs), inputs);
        ASSERT_FALSE(HasFatalFailure()) << Name(dtype) << ", assignment " << a;
      }
      const auto first = static_cast<size_t>(plan.assignments() * cuda::Int8RowBytes(args));
      EXPECT_TRUE(std::all_of(rounded.values.begin() + first, rounded.values.end(),
                              [](char c) { return c == 0x55; }));
    }
  }
}

TEST(LinearInt8Test, DenseProductsHaveTheBitsOfTheCpu) {
  Random random(4);
  for (const auto& [rows, in, out] : std::vector<std::tuple<int, int, int>>{{1, 1, 1},
                                                                            {2, 3, 5},
                                                                            {7, 16, 16},
                                                                            {8, 33, 17},
                                                                            {9, 128, 63},
                                                                            {63, 24, 65},
                                                                            {64, 129, 96},
                                                                            {65, 500, 130},
                                                                            {200, 71, 70},
                                                                            {1, 4100, 40},
                                                                            {3, 1100, 200}}) {
    for (const bool bias : {false, true}) {
      const BankPair pair({in}, {out}, false, bias, random);
      for (const DType dtype : kRowTypes) {
        const DType out_type = bias ? dtype : DType::kF32;
        DeviceRows x(rows, in, in + 3, dtype, SomeRows(random, rows, in));
        HostRowsOf expected(rows, out, out_type);
        pair.OnCpu({.input = x.Fetch(), .output = expected.view});
        for (const LinearTile tile : kInt8Tiles) {
          DeviceRows y(rows, out, out + 3, out_type);
          Launch({.bank = pair.bank.get(), .input = x.view(), .output = y.view()}, tile);
          const RowsView result = y.Fetch();
          for (int r = 0; r < rows; ++r) {
            ASSERT_TRUE(SameNumbers(result, expected.view, r, out))
                << Name(dtype) << ", " << rows << " x " << in << " x " << out << ", tile "
                << static_cast<int>(tile);
          }
          ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, out)));
        }
      }
    }
  }
}

// The largest sum of a row: every product is 127 * 127.
TEST(LinearInt8Test, LargestSums) {
  constexpr int kIn = kWholeRow;
  const auto bank =
      std::move(CudaLinearBank::Create({{kIn}, {8}, false, false, DType::kBF16, kType})).value();
  bank->LoadWeight(0, Half::kMain, 0, MakeTensor(std::vector<float>(8 * kIn, 127.0f), {8, kIn}));
  DeviceRows x(2, kIn, kIn, DType::kBF16, std::vector<float>(2 * kIn, -127.0f));
  for (const LinearTile tile : kInt8Tiles) {
    DeviceRows y(2, 8, 8, DType::kF32);
    Launch({.bank = bank.get(), .input = x.view(), .output = y.view()}, tile);
    for (const double sum : RowOf(y.Fetch(), 1, 8)) {
      EXPECT_NEAR(sum / (-127.0 * 127.0 * kIn), 1.0, 1e-6);
    }
  }
}

// Both products of gated and other experts of very unequal widths. Without an activation the
// results have the CPU's bits; the second product gets the same hidden units on both devices.
TEST(LinearInt8Test, ExpertsHaveTheBitsOfTheCpu) {
  Random random(5);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 0, 67, 200};
  const int experts = static_cast<int>(widths.size()), model = 136, widest = 200;
  std::vector<int> outputs;
  for (const int width : widths) outputs.push_back(width == 0 ? 0 : model);
  int turn = 0;
  for (const bool gated : {false, true}) {
    const BankPair up({model}, widths, gated, true, random);
    const BankPair down(widths, outputs, false, false, random);
    for (const int rows : {1, 6, 41, 150}) {
      std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
      for (auto& r : routes) {
        for (int e = 0; e < experts; ++e) {
          if (e == 8 || random.Below(3) == 0) r.push_back(e);
        }
      }
      const DevicePlan plan(experts, routes, 5);
      const RoutingPlan host_plan = HostPlan(plan);
      const DType dtype = kRowTypes[turn % 2];
      DeviceRows x(rows, model, model, dtype, SomeRows(random, rows, model));
      const RowsView x_host = x.Fetch();
      HostRowsOf hidden_cpu(plan.plan.capacity, 208, dtype);
      HostRowsOf results_cpu(plan.plan.capacity, model, DType::kF32);
      up.OnCpu({.plan = &host_plan,
                .gather = true,
                .input = x_host,
                .output = hidden_cpu.view,
                .pad_output = true});
      RowsView hidden_rows = hidden_cpu.view;
      hidden_rows.cols = widest;
      down.OnCpu({.plan = &host_plan, .input = hidden_rows, .output = results_cpu.view});
      for (int t = 0; t < 2; ++t) {
        const LinearTile tile = kInt8Tiles[turn++ % std::size(kInt8Tiles)];
        DeviceRows hidden(plan.plan.capacity, widest, 208, dtype);
        DeviceRows results(plan.plan.capacity, model, model, DType::kF32);
        Launch({.bank = up.bank.get(),
                .plan = &plan.plan,
                .gather = true,
                .input = x.view(),
                .output = hidden.view(),
                .pad_output = true},
               tile);
        Launch({.bank = down.bank.get(),
                .plan = &plan.plan,
                .input = hidden.view(),
                .output = results.view()},
               tile);
        const RowsView middle = hidden.Fetch(), output = results.Fetch();
        std::vector<int64_t> written, all;
        for (int a = 0; a < plan.assignments(); ++a) {
          const int width = widths[plan.expert[a]];
          written.push_back(RoundUp16(width));
          all.push_back(outputs[plan.expert[a]]);
          ASSERT_TRUE(SameNumbers(middle, hidden_cpu.view, a, width)) << "hidden, " << rows;
          if (width > 0) {
            ASSERT_TRUE(SameNumbers(output, results_cpu.view, a, model)) << "results, " << rows;
          }
        }
        ASSERT_TRUE(hidden.OthersUntouched(plan.assignments(), written));
        ASSERT_TRUE(results.OthersUntouched(plan.assignments(), all));
      }
    }
  }
}

TEST(LinearInt8Test, ActivationsAreNearThoseOfTheCpu) {
  Random random(6);
  constexpr int kIn = 160, kOut = 72, kRows = 21;
  const Activation kinds[] = {ActivationKind::kSilu,     ActivationKind::kGelu,
                              ActivationKind::kGeluTanh, ActivationKind::kRelu,
                              ActivationKind::kTanh,     ActivationKind::kRelu2,
                              GeneralActivation()};
  for (const bool gated : {false, true}) {
    const BankPair pair({kIn}, {kOut}, gated, true, random);
    for (const Activation& kind : kinds) {
      if (!gated && !IsPlain(kind)) continue;
      for (const DType out_type : kRowTypes) {
        DeviceRows x(kRows, kIn, kIn, DType::kBF16, random.Normals(kRows * kIn));
        HostRowsOf expected(kRows, kOut, out_type);
        pair.OnCpu({.input = x.Fetch(), .output = expected.view, .activation = kind});
        DeviceRows y(kRows, kOut, kOut, out_type);
        Launch({.bank = pair.bank.get(), .input = x.view(), .output = y.view(), .activation = kind},
               LinearTile::kAuto);
        const RowsView result = y.Fetch();
        for (int r = 0; r < kRows; ++r) {
          ASSERT_TRUE(RowNear(RowOf(result, r, kOut), RowOf(expected.view, r, kOut),
                              2 * Epsilon(out_type) + 2e-6))
              << static_cast<int>(kind.kind);
        }
      }
    }
  }
}

TEST(LinearInt8Test, SegmentsHaveTheBitsOfTheCpu) {
  Random random(7);
  constexpr int kIn = 40, kOut = 24, kExperts = 3;
  const BankPair pair({kIn}, {kOut, kOut, kOut}, false, true, random);
  for (const int rows : {1, 30}) {
    for (const DType dtype : kRowTypes) {
      DeviceRows x(rows, kIn * kExperts, kIn * kExperts, dtype,
                   SomeRows(random, rows, kIn * kExperts));
      HostRowsOf expected(rows, kOut * kExperts, DType::kF32);
      pair.OnCpu({.input = x.Fetch(), .output = expected.view, .segments = true});
      for (const LinearTile tile : kInt8Tiles) {
        DeviceRows y(rows, kOut * kExperts, kOut * kExperts, DType::kF32);
        Launch({.bank = pair.bank.get(), .input = x.view(), .output = y.view(), .segments = true},
               tile);
        const RowsView result = y.Fetch();
        for (int r = 0; r < rows; ++r) {
          ASSERT_TRUE(SameNumbers(result, expected.view, r, kOut * kExperts)) << Name(dtype);
        }
      }
    }
  }
}

// A row's bits do not depend on other rows, and values that are not finite stay in their rows.
TEST(LinearInt8Test, RowsDoNotInfluenceEachOther) {
  Random random(8);
  constexpr int kIn = 72, kOut = 150, kRows = 300;
  const BankPair pair({kIn}, {kOut}, true, false, random);
  for (const DType dtype : kRowTypes) {
    std::vector<float> values = random.Normals(int64_t{kRows} * kIn);
    values[5 * kIn + 7] = std::numeric_limits<float>::quiet_NaN();
    values[77 * kIn + 66] = std::numeric_limits<float>::infinity();
    DeviceRows x(kRows, kIn, kIn, dtype, values);
    DeviceRows together(kRows, kOut, kOut, DType::kBF16);
    const LinearArgs args{.bank = pair.bank.get(),
                          .input = x.view(),
                          .output = together.view(),
                          .activation = ActivationKind::kSilu};
    Launch(args, LinearTile::kAuto);
    const RowsView all = together.Fetch();
    for (const int r : {0, 4, 5, 6, 76, 77, 78, 299}) {
      LinearArgs one = args;
      one.input.data = x.view().row(r);
      one.input.rows = 1;
      DeviceRows alone(1, kOut, kOut, DType::kBF16);
      one.output = alone.view();
      Launch(one, LinearTile::kAuto);
      ASSERT_TRUE(SameBits(alone.Fetch(), all, 0, r, kOut)) << "row " << r;
      ASSERT_EQ(std::isnan(RowOf(all, r, 1)[0]), r == 5 || r == 77);
    }
  }
}

}  // namespace
}  // namespace moeserve::testing

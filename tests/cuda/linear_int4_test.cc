// Weights of type int4-k on the device: their image, the sums of rounded input rows, and products
// with the bits of the CPU backend.

#include "kernels/cuda/quantized/linear_int4.h"

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

constexpr Quantization kInt4Type = Quantization::kInt4K;
constexpr DType kInt4RowTypes[] = {DType::kF32, DType::kBF16};

struct Int4BankPair : IntegerBankPair {
  Int4BankPair(std::vector<int> in, std::vector<int> out, bool gated, bool bias, Random& random)
      : IntegerBankPair(kInt4Type, std::move(in), std::move(out), gated, bias, random) {}
};

std::unique_ptr<CudaLinearBank> Int4Bank(std::vector<int> in, std::vector<int> out, bool gated) {
  return std::move(CudaLinearBank::Create(
                       {std::move(in), std::move(out), gated, false, DType::kBF16, kInt4Type}))
      .value();
}

void LaunchInt4(const LinearArgs& args, LinearTile tile) {
  cuda::Int8Rows rows;
  ASSERT_TRUE(rows.MustGrow(args));
  ASSERT_TRUE(rows.Reserve(args).ok());
  ASSERT_FALSE(rows.MustGrow(args));
  cuda::LaunchLinearInt4(args, tile, rows, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// Sets four bits of an image that were 0. The places are stated here independently of the functions
// of linear_image.h.
struct ExpectedImage {
  std::vector<uint8_t> bytes;
  int k_blocks;
  int64_t strip;

  ExpectedImage(int row_blocks, int blocks)
      : k_blocks(blocks), strip((blocks + 7) / 8 * 1024 + blocks * 4224) {
    bytes.resize(static_cast<size_t>(row_blocks * strip));
  }
  void Set(int64_t at, bool high, int value) {
    auto& byte = bytes[static_cast<size_t>(at)];
    EXPECT_EQ(high ? byte >> 4 : byte & 15, 0);
    byte = static_cast<uint8_t>(byte | value << (high ? 4 : 0));
  }
  void SetValue(int row, int k, int value) {
    const int64_t block = row / 64 * strip + (k_blocks + 7) / 8 * 1024 + k / 128 * 4224;
    const int lane = row % 8 * 4 + k % 16 / 4;
    Set(block + row % 64 / 16 * 1056 + k % 128 / 64 * 512 + lane * 16 + k % 64 / 32 * 8 +
            row % 16 / 8 * 4 + k % 4,
        k % 32 >= 16, value);
  }
  void SetFactors(int row, int group, int s, int m) {
    const int64_t block = row / 64 * strip + (k_blocks + 7) / 8 * 1024 + group / 4 * 4224;
    Set(block + row % 64 / 16 * 1056 + 1024 + row % 8 * 4 + row % 16 / 8 * 2 + group % 4 / 2,
        group % 2 == 1, s);
    const int lane = row % 8 * 4 + group % 16 / 4;
    Set(row / 64 * strip + group / 32 * 1024 + row % 64 / 16 * 256 + lane * 8 + row % 16 / 8 * 4 +
            group % 4,
        group % 32 >= 16, m);
  }
};

TEST(LinearInt4Test, EachIntegerHasItsPlaceInTheImage) {
  constexpr int kOut = 70;
  Random random(1);
  for (const auto& [gated, in] : {std::pair{false, 300}, {true, 299}, {false, 1157}}) {
    const auto bank = Int4Bank({in}, {kOut}, gated);
    const cuda::LinearBankEntry& m = bank->entry(0);
    EXPECT_EQ(m.k_blocks, (in + 127) / 128);
    EXPECT_EQ(m.row_blocks, gated ? 3 : 2);
    ExpectedImage expected(m.row_blocks, m.k_blocks);
    const auto packed_rows = static_cast<size_t>(m.row_blocks * 64);
    EXPECT_EQ(bank->bytes(), static_cast<int64_t>(expected.bytes.size() + packed_rows * 8));
    std::vector<float> scales(packed_rows, 0.0f), units(packed_rows, 0.0f);
    for (const bool gate : {false, true}) {
      if (gate && !gated) continue;
      const IntegerWeight w = MakeAnyInt4K(random, kOut, in);
      bank->LoadQuantized(0, gate ? Half::kGate : Half::kMain, 0, w.integers);
      for (int r = 0; r < kOut; ++r) {
        // Eight rows of the gate and eight of the other half alternate.
        const int row = !gated ? r : r / 8 * 16 + (gate ? 0 : 8) + r % 8;
        scales[row] = F32FromF16(w.integers.scales[2 * r]);
        units[row] = F32FromF16(w.integers.scales[2 * r + 1]);
        for (int k = 0; k < in; ++k) expected.SetValue(row, k, w.integers.value(r, k));
        const uint8_t* const factors =
            w.integers.values + r * QuantRowBytes(kInt4Type, in) + (in + 1) / 2;
        for (int g = 0; g < (in + 31) / 32; ++g) {
          expected.SetFactors(row, g, factors[g] & 15, factors[g] >> 4);
        }
      }
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<char> image = ReadDevice(bank->weights(), expected.bytes.size());
    EXPECT_EQ(std::memcmp(image.data(), expected.bytes.data(), image.size()), 0);
    const std::vector<char> d = ReadDevice(bank->scales(), packed_rows * sizeof(float));
    EXPECT_EQ(std::memcmp(d.data(), scales.data(), d.size()), 0);
    const std::vector<char> u = ReadDevice(bank->units(), packed_rows * sizeof(float));
    EXPECT_EQ(std::memcmp(u.data(), units.data(), u.size()), 0);
  }
}

TEST(LinearInt4Test, WeightsTakeLittleMoreThanAQuarterOfBf16) {
  const std::vector<int> in(8, 4096), out(8, 1408);
  const auto bf16 = std::move(CudaLinearBank::Create({in, out, true, false, DType::kBF16})).value();
  const double share =
      static_cast<double>(Int4Bank(in, out, true)->bytes()) / static_cast<double>(bf16->bytes());
  EXPECT_GT(share, 0.265);
  EXPECT_LT(share, 0.28);
}

TEST(LinearInt4Test, LongRowsAreRefused) {
  EXPECT_TRUE(absl::IsUnimplemented(
      CudaLinearBank::Create({{kWholeRow + 1}, {64}, false, false, DType::kBF16, kInt4Type})
          .status()));
}

// The integers and scales are those of int8-channel; before the integers are the sums of each 32.
TEST(LinearInt4Test, RoundedRowsHaveTheirSums) {
  Random random(2);
  for (const DType dtype : kInt4RowTypes) {
    for (const auto& [rows, in] : std::vector<std::pair<int, int>>{
             {1, 1}, {7, 33}, {9, 128}, {6, 1000}, {6, 1032}, {7, 2500}, {1, 4100}}) {
      const auto bank = Int4Bank({in}, {8}, false);
      std::vector<float> numbers = SomeRows(random, rows, in);
      // All integers are 127 in row 0, and all are -127 in the last one.
      std::fill_n(numbers.begin(), in, 2.0f);
      if (rows > 1) std::fill_n(numbers.end() - in, in, -3.0f);
      DeviceRows x(rows, in, in + 3, dtype, numbers);
      const LinearArgs args{.bank = bank.get(), .input = x.view(), .output = {}};
      const RoundedCase rounded(args, rows);
      const int64_t row_bytes = cuda::Int8RowBytes(args);
      const int k_blocks = (in + 127) / 128, sum_blocks = (in + 1023) / 1024;
      ASSERT_EQ(row_bytes, (k_blocks + sum_blocks) * 128);
      const RowsView input = x.Fetch();
      for (int r = 0; r < rows; ++r) {
        const std::vector<double> row = RowOf(input, r, in);
        std::vector<int8_t> expected(static_cast<size_t>(sum_blocks) * 1024, 0);
        const float scale = RoundRowToInt8(
            in, [&](int64_t i) { return static_cast<float>(row[static_cast<size_t>(i)]); },
            expected.data());
        const auto* const found =
            reinterpret_cast<const int8_t*>(rounded.values.data()) + r * row_bytes;
        ASSERT_EQ(std::memcmp(found + sum_blocks * 128, expected.data(), k_blocks * 128), 0) << r;
        ASSERT_EQ(std::memcmp(rounded.scales.data() + r * 4, &scale, 4), 0) << r;
        for (int g = 0; g < sum_blocks * 32; ++g) {
          int sum = 0;
          for (int i = 0; i < 32; ++i) sum += expected[static_cast<size_t>(g * 32 + i)];
          const int8_t* const parts = found + g / 32 * 128 + g % 32;
          ASSERT_EQ(16 * (parts[0] + parts[32]) + parts[64], sum) << r << ", " << g;
          ASSERT_EQ(parts[96], 0);
        }
      }
    }
  }
}

TEST(LinearInt4Test, DenseProductsHaveTheBitsOfTheCpu) {
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
      const Int4BankPair pair({in}, {out}, false, bias, random);
      for (const DType dtype : kInt4RowTypes) {
        const DType out_type = bias ? dtype : DType::kF32;
        DeviceRows x(rows, in, in + 3, dtype, SomeRows(random, rows, in));
        HostRowsOf expected(rows, out, out_type);
        pair.OnCpu({.input = x.Fetch(), .output = expected.view});
        for (const LinearTile tile : kInt4Tiles) {
          DeviceRows y(rows, out, out + 3, out_type);
          LaunchInt4({.bank = pair.bank.get(), .input = x.view(), .output = y.view()}, tile);
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

// Layers with so many tiles that those of 8 and of 64 rows take the wide form.
TEST(LinearInt4Test, WideLayersHaveTheBitsOfTheCpu) {
  Random random(9);
  for (const auto& [rows, in, out, tile] : std::vector<std::tuple<int, int, int, LinearTile>>{
           {9, 200, 3100, LinearTile::kRows8}, {130, 72, 8300, LinearTile::kRows64}}) {
    const Int4BankPair pair({in}, {out}, false, false, random);
    DeviceRows x(rows, in, in, DType::kBF16, random.Normals(int64_t{rows} * in));
    HostRowsOf expected(rows, out, DType::kF32);
    pair.OnCpu({.input = x.Fetch(), .output = expected.view});
    DeviceRows y(rows, out, out, DType::kF32);
    LaunchInt4({.bank = pair.bank.get(), .input = x.view(), .output = y.view()}, tile);
    const RowsView result = y.Fetch();
    for (int r = 0; r < rows; ++r) ASSERT_TRUE(SameNumbers(result, expected.view, r, out));
  }
}

// The longest rows with the elements of largest magnitude, 225 d and -255 d: the sums nearly fill
// 32 bits.
TEST(LinearInt4Test, LargestSums) {
  constexpr int kIn = kWholeRow, kOut = 8;
  Random random(5);
  const Int4BankPair pair({kIn}, {kOut}, false, false, random);
  IntegerWeight w = MakeAnyInt4K(random, kOut, kIn);
  std::vector<uint8_t> bytes;
  std::vector<F16> scales;
  for (int r = 0; r < kOut; ++r) {
    const bool lowest = r % 2 == 1;
    bytes.insert(bytes.end(), kIn / 2, lowest ? 0x00 : 0xff);
    bytes.insert(bytes.end(), kIn / 32, lowest ? 0xff : r < 4 ? 0x0f : 0xff);
    scales.push_back(F16FromF32(1.0f));
    scales.push_back(F16FromF32(17.0f));
  }
  w.integers.values = bytes.data();
  w.integers.scales = scales.data();
  pair.bank->LoadQuantized(0, Half::kMain, 0, w.integers);
  pair.cpu_bank->LoadQuantized(0, Half::kMain, 0, w.integers);
  std::vector<float> values(2 * kIn, 127.0f);
  std::fill_n(values.begin(), kIn, -127.0f);
  DeviceRows x(2, kIn, kIn, DType::kBF16, values);
  HostRowsOf expected(2, kOut, DType::kF32);
  pair.OnCpu({.input = x.Fetch(), .output = expected.view});
  EXPECT_NEAR(RowOf(expected.view, 0, kOut)[1] / (255.0 * 127.0 * kIn), 1.0, 1e-6);
  for (const LinearTile tile : kInt4Tiles) {
    DeviceRows y(2, kOut, kOut, DType::kF32);
    LaunchInt4({.bank = pair.bank.get(), .input = x.view(), .output = y.view()}, tile);
    const RowsView result = y.Fetch();
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(SameNumbers(result, expected.view, r, kOut));
  }
}

// Both products of gated and other experts of very unequal widths. Without an activation the
// results have the CPU's bits; the second product gets the same hidden units on both devices.
TEST(LinearInt4Test, ExpertsHaveTheBitsOfTheCpu) {
  Random random(5);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 0, 67, 200, 1030};
  const int experts = static_cast<int>(widths.size()), model = 136, widest = 1030;
  std::vector<int> outputs;
  for (const int width : widths) outputs.push_back(width == 0 ? 0 : model);
  int turn = 0;
  for (const bool gated : {false, true}) {
    const Int4BankPair up({model}, widths, gated, true, random);
    const Int4BankPair down(widths, outputs, false, false, random);
    for (const int rows : {1, 6, 41, 150}) {
      std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
      for (auto& r : routes) {
        for (int e = 0; e < experts; ++e) {
          if (e == 8 || random.Below(3) == 0) r.push_back(e);
        }
      }
      const DevicePlan plan(experts, routes, 5);
      const RoutingPlan host_plan = HostPlan(plan);
      const DType dtype = kInt4RowTypes[turn % 2];
      DeviceRows x(rows, model, model, dtype, SomeRows(random, rows, model));
      const RowsView x_host = x.Fetch();
      HostRowsOf hidden_cpu(plan.plan.capacity, 1040, dtype);
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
        const LinearTile tile = kInt4Tiles[turn++ % std::size(kInt4Tiles)];
        DeviceRows hidden(plan.plan.capacity, widest, 1040, dtype);
        DeviceRows results(plan.plan.capacity, model, model, DType::kF32);
        LaunchInt4({.bank = up.bank.get(),
                    .plan = &plan.plan,
                    .gather = true,
                    .input = x.view(),
                    .output = hidden.view(),
                    .pad_output = true},
                   tile);
        LaunchInt4({.bank = down.bank.get(),
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

TEST(LinearInt4Test, ActivationsAreNearThoseOfTheCpu) {
  Random random(6);
  constexpr int kIn = 160, kOut = 72, kRows = 21;
  for (const bool gated : {false, true}) {
    const Int4BankPair pair({kIn}, {kOut}, gated, true, random);
    for (const Activation& kind : {Activation(ActivationKind::kSilu),
                                   Activation(ActivationKind::kGelu), GeneralActivation()}) {
      if (!gated && !IsPlain(kind)) continue;
      for (const DType out_type : kInt4RowTypes) {
        DeviceRows x(kRows, kIn, kIn, DType::kBF16, random.Normals(kRows * kIn));
        HostRowsOf expected(kRows, kOut, out_type);
        pair.OnCpu({.input = x.Fetch(), .output = expected.view, .activation = kind});
        DeviceRows y(kRows, kOut, kOut, out_type);
        LaunchInt4(
            {.bank = pair.bank.get(), .input = x.view(), .output = y.view(), .activation = kind},
            LinearTile::kAuto);
        const RowsView result = y.Fetch();
        for (int r = 0; r < kRows; ++r) {
          ASSERT_TRUE(RowNear(RowOf(result, r, kOut), RowOf(expected.view, r, kOut),
                              2 * Epsilon(out_type) + 2e-6));
        }
      }
    }
  }
}

TEST(LinearInt4Test, SegmentsHaveTheBitsOfTheCpu) {
  Random random(7);
  constexpr int kIn = 40, kOut = 24, kExperts = 3;
  const Int4BankPair pair({kIn}, {kOut, kOut, kOut}, false, true, random);
  for (const int rows : {1, 30}) {
    for (const DType dtype : kInt4RowTypes) {
      DeviceRows x(rows, kIn * kExperts, kIn * kExperts, dtype,
                   SomeRows(random, rows, kIn * kExperts));
      HostRowsOf expected(rows, kOut * kExperts, DType::kF32);
      pair.OnCpu({.input = x.Fetch(), .output = expected.view, .segments = true});
      for (const LinearTile tile : kInt4Tiles) {
        DeviceRows y(rows, kOut * kExperts, kOut * kExperts, DType::kF32);
        LaunchInt4(
            {.bank = pair.bank.get(), .input = x.view(), .output = y.view(), .segments = true},
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
TEST(LinearInt4Test, RowsDoNotInfluenceEachOther) {
  Random random(8);
  constexpr int kIn = 72, kOut = 150, kRows = 300;
  const Int4BankPair pair({kIn}, {kOut}, true, false, random);
  for (const DType dtype : kInt4RowTypes) {
    std::vector<float> values = random.Normals(int64_t{kRows} * kIn);
    values[5 * kIn + 7] = std::numeric_limits<float>::quiet_NaN();
    values[77 * kIn + 66] = std::numeric_limits<float>::infinity();
    DeviceRows x(kRows, kIn, kIn, dtype, values);
    DeviceRows together(kRows, kOut, kOut, DType::kBF16);
    const LinearArgs args{.bank = pair.bank.get(),
                          .input = x.view(),
                          .output = together.view(),
                          .activation = ActivationKind::kSilu};
    LaunchInt4(args, LinearTile::kAuto);
    const RowsView all = together.Fetch();
    for (const int r : {0, 4, 5, 6, 76, 77, 78, 299}) {
      LinearArgs one = args;
      one.input.data = x.view().row(r);
      one.input.rows = 1;
      DeviceRows alone(1, kOut, kOut, DType::kBF16);
      one.output = alone.view();
      LaunchInt4(one, LinearTile::kAuto);
      ASSERT_TRUE(SameBits(alone.Fetch(), all, 0, r, kOut)) << "row " << r;
      ASSERT_EQ(std::isnan(RowOf(all, r, 1)[0]), r == 5 || r == 77);
    }
  }
}

}  // namespace
}  // namespace moeserve::testing

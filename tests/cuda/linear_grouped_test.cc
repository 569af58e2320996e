// Weights of types int8 and int4 on the device: their image, and products with the bits of the CPU
// backend.

#include "kernels/cuda/quantized/linear_grouped.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/cuda/linear/linear_image.h"
#include "tests/cuda/integer_case.h"

namespace moeserve::testing {
namespace {

using cuda::CudaLinearBank;
using cuda::LinearTile;
using Half = LinearBank::Half;

constexpr Quantization kGroupedTypes[] = {Quantization::kInt8, Quantization::kInt4};
constexpr DType kGroupedRowTypes[] = {DType::kF32, DType::kBF16};

void LaunchGrouped(const LinearArgs& args, LinearTile tile) {
  cuda::Int8Rows rows;
  ASSERT_TRUE(rows.MustGrow(args));
  ASSERT_TRUE(rows.Reserve(args).ok());
  ASSERT_FALSE(rows.MustGrow(args));
  // Memory that the rounding does not write is NaN.
  const bool of_assignments = args.plan != nullptr && !args.gather;
  const int64_t all = of_assignments ? args.plan->capacity : args.input.rows;
  ASSERT_EQ(cudaMemset(rows.values(), 0xff, static_cast<size_t>(all * cuda::Int8RowBytes(args))),
            cudaSuccess);
  cuda::LaunchLinearGrouped(args, tile, rows, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// The places of integers and scales are stated here independently of the functions of
// linear_image.h.
TEST(LinearGroupedTest, EachIntegerHasItsPlaceInTheImage) {
  constexpr int kOut = 70;
  Random random(1);
  for (const Quantization type : kGroupedTypes) {
    const bool int4 = type == Quantization::kInt4;
    const int group = int4 ? 32 : 64, groups = 128 / group;
    const int integer_bytes = int4 ? 1024 : 2048, tile_bytes = integer_bytes + groups * 32;
    for (const auto& [gated, in] : {std::pair{false, 300}, {true, 299}}) {
      const auto bank =
          std::move(CudaLinearBank::Create({{in}, {kOut}, gated, false, DType::kBF16, type}))
              .value();
      const cuda::LinearBankEntry& m = bank->entry(0);
      ASSERT_EQ(m.k_blocks, 3);
      ASSERT_EQ(m.row_blocks, gated ? 3 : 2);
      std::vector<uint8_t> expected(static_cast<size_t>(m.row_blocks * 3 * 4 * tile_bytes), 0);
      ASSERT_EQ(bank->bytes(), static_cast<int64_t>(expected.size()));
      for (const bool gate : {false, true}) {
        if (gate && !gated) continue;
        const IntegerWeight w = MakeWeight(random, type, kOut, in);
        bank->LoadQuantized(0, gate ? Half::kGate : Half::kMain, 0, w.integers);
        for (int r = 0; r < kOut; ++r) {
          // Eight rows of the gate and eight of the other half alternate.
          const int row = !gated ? r : r / 8 * 16 + (gate ? 0 : 8) + r % 8;
          const auto tile_at = [&](int block) {
            return ((row / 64 * 3 + block) * 4 + row % 64 / 16) * tile_bytes;
          };
          for (int k = 0; k < in; ++k) {
            const int lane = row % 8 * 4 + k % 16 / 4;
            int at = tile_at(k / 128) + lane * 16 + row % 16 / 8 * 4 + k % 4;
            at +=
                int4 ? k % 128 / 64 * 512 + k % 64 / 32 * 8 : k % 128 / 32 * 512 + k % 32 / 16 * 8;
            const int shift = int4 && k % 32 >= 16 ? 4 : 0;
            const int bits = w.integers.value(r, k) & (int4 ? 15 : 255);
            expected[at] = static_cast<uint8_t>(expected[at] | bits << shift);
          }
          const int64_t row_groups = QuantGroups(type, in);
          for (int g = 0; g < row_groups; ++g) {
            const int at = tile_at(g / groups) + integer_bytes +
                           ((row % 8 * groups + g % groups) * 2 + row % 16 / 8) * 2;
            std::memcpy(&expected[at], &w.integers.scales[r * row_groups + g], 2);
          }
        }
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<char> image = ReadDevice(bank->weights(), expected.size());
      EXPECT_EQ(std::memcmp(image.data(), expected.data(), image.size()), 0) << Name(type);
    }
  }
}

TEST(LinearGroupedTest, DenseProductsHaveTheBitsOfTheCpu) {
  Random random(4);
  for (const Quantization type : kGroupedTypes) {
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
        const IntegerBankPair pair(type, {in}, {out}, false, bias, random);
        for (const DType dtype : kGroupedRowTypes) {
          const DType out_type = bias ? dtype : DType::kF32;
          DeviceRows x(rows, in, in + 3, dtype, SomeRows(random, rows, in));
          HostRowsOf expected(rows, out, out_type);
          pair.OnCpu({.input = x.Fetch(), .output = expected.view});
          for (const LinearTile tile : kInt4Tiles) {
            DeviceRows y(rows, out, out + 3, out_type);
            LaunchGrouped({.bank = pair.bank.get(), .input = x.view(), .output = y.view()}, tile);
            const RowsView result = y.Fetch();
            for (int r = 0; r < rows; ++r) {
              ASSERT_TRUE(SameNumbers(result, expected.view, r, out))
                  << Name(type) << ", " << Name(dtype) << ", " << rows << " x " << in << " x "
                  << out << ", tile " << static_cast<int>(tile);
            }
            ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, out)));
          }
        }
      }
    }
  }
}

// Both products of gated and other experts of very unequal widths. Without an activation the
// results have the CPU's bits; the second product gets the same hidden units on both devices.
TEST(LinearGroupedTest, ExpertsHaveTheBitsOfTheCpu) {
  Random random(5);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 0, 67, 200};
  const int experts = static_cast<int>(widths.size()), model = 136, widest = 200;
  std::vector<int> outputs;
  for (const int width : widths) outputs.push_back(width == 0 ? 0 : model);
  int turn = 0;
  for (const Quantization type : kGroupedTypes) {
    for (const bool gated : {false, true}) {
      const IntegerBankPair up(type, {model}, widths, gated, true, random);
      const IntegerBankPair down(type, widths, outputs, false, false, random);
      for (const int rows : {1, 6, 41, 150}) {
        std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
        for (auto& r : routes) {
          for (int e = 0; e < experts; ++e) {
            if (e == 8 || random.Below(3) == 0) r.push_back(e);
          }
        }
        const DevicePlan plan(experts, routes, 5);
        const RoutingPlan host_plan = HostPlan(plan);
        const DType dtype = kGroupedRowTypes[turn % 2];
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
          const LinearTile tile = kInt4Tiles[turn++ % std::size(kInt4Tiles)];
          DeviceRows hidden(plan.plan.capacity, widest, 208, dtype);
          DeviceRows results(plan.plan.capacity, model, model, DType::kF32);
          LaunchGrouped({.bank = up.bank.get(),
                         .plan = &plan.plan,
                         .gather = true,
                         .input = x.view(),
                         .output = hidden.view(),
                         .pad_output = true},
                        tile);
          LaunchGrouped({.bank = down.bank.get(),
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
}

TEST(LinearGroupedTest, SegmentsHaveTheBitsOfTheCpu) {
  Random random(7);
  constexpr int kIn = 40, kOut = 24, kExperts = 3;
  for (const Quantization type : kGroupedTypes) {
    const IntegerBankPair pair(type, {kIn}, {kOut, kOut, kOut}, false, true, random);
    for (const int rows : {1, 30}) {
      for (const DType dtype : kGroupedRowTypes) {
        DeviceRows x(rows, kIn * kExperts, kIn * kExperts, dtype,
                     SomeRows(random, rows, kIn * kExperts));
        HostRowsOf expected(rows, kOut * kExperts, DType::kF32);
        pair.OnCpu({.input = x.Fetch(), .output = expected.view, .segments = true});
        for (const LinearTile tile : kInt4Tiles) {
          DeviceRows y(rows, kOut * kExperts, kOut * kExperts, DType::kF32);
          LaunchGrouped(
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
}

}  // namespace
}  // namespace moeserve::testing

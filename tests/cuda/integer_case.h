// Banks of integer weights on the device and on the CPU, for tests that compare their products.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/int8_rows.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/registry.h"
#include "tests/cuda/linear_case.h"
#include "tests/support/integer_weights.h"

namespace moeserve::testing {

inline constexpr cuda::LinearTile kInt4Tiles[] = {
    cuda::LinearTile::kRows8, cuda::LinearTile::kRows16, cuda::LinearTile::kRows32,
    cuda::LinearTile::kRows64, cuda::LinearTile::kRows128};

// Returns weights of type int4-k with integers, factors and units of any value.
inline IntegerWeight MakeAnyInt4K(Random& random, int out, int in) {
  struct Owner {
    std::vector<uint8_t> bytes;
    std::vector<F16> scales;
  };
  constexpr Quantization kType = Quantization::kInt4K;
  auto owner = std::make_shared<Owner>();
  std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(kType, in)));
  owner->bytes.resize(static_cast<size_t>(out * QuantRowBytes(kType, in)));
  for (int r = 0; r < out; ++r) {
    for (int i = 0; i < static_cast<int>(values.size()); ++i) {
      values[static_cast<size_t>(i)] =
          static_cast<int8_t>(static_cast<uint8_t>(random.Below(i < in ? 16 : 256)));
    }
    PackQuantizedRow(kType, in, values.data(), owner->bytes.data() + r * QuantRowBytes(kType, in));
    owner->scales.push_back(F16FromF32(random.Normals(1, 0.01)[0]));
    owner->scales.push_back(F16FromF32(static_cast<float>(random.Below(kMaxMinimumUnit + 1))));
  }
  IntegerWeight w;
  w.integers = {kType, out, in, owner->bytes.data(), owner->scales.data(), owner};
  return w;
}

// A bank of the device and one of the CPU with the same weights and biases.
struct IntegerBankPair {
  Quantization type;
  std::unique_ptr<Backend> cpu;
  std::unique_ptr<cuda::CudaLinearBank> bank;
  std::unique_ptr<LinearBank> cpu_bank;

  IntegerBankPair(Quantization quantization, std::vector<int> in, std::vector<int> out, bool gated,
                  bool bias, Random& random)
      : type(quantization), cpu(std::move(CreateBackend({.device = "cpu", .threads = 1})).value()) {
    const LinearBankShape shape{.in_features = std::move(in),
                                .out_features = std::move(out),
                                .gated = gated,
                                .bias = bias,
                                .weight_dtype = DType::kBF16,
                                .quantization = type};
    bank = std::move(cuda::CudaLinearBank::Create(shape)).value();
    cpu_bank = std::move(cpu->NewLinearBank(shape)).value();
    for (int e = 0; e < bank->num_experts(); ++e) {
      Load(LinearBank::Half::kMain, e, random);
      if (gated) Load(LinearBank::Half::kGate, e, random);
    }
  }

  // Computes the product on the CPU, for rows and a plan in host memory.
  void OnCpu(LinearArgs args) const {
    args.bank = cpu_bank.get();
    cpu->Linear(args);
  }

 private:
  // Loads the matrix in two parts, the first one as numbers and the second one as integers.
  void Load(LinearBank::Half half, int e, Random& random) {
    const int in = bank->shape().in_features_of(e), out = bank->shape().out_features[e];
    int row = 0;
    for (const int count : {out / 3, out - out / 3}) {
      if (count == 0) continue;
      const IntegerWeight w = row > 0 && type == Quantization::kInt4K
                                  ? MakeAnyInt4K(random, count, in)
                                  : MakeWeight(random, type, count, in);
      for (LinearBank* to : {static_cast<LinearBank*>(bank.get()), cpu_bank.get()}) {
        row == 0 ? to->LoadWeight(e, half, row, w.numbers)
                 : to->LoadQuantized(e, half, row, w.integers);
      }
      row += count;
    }
    if (!bank->shape().bias || out == 0) return;
    const HostTensor t = MakeTensor(random.Normals(out), {out});
    bank->LoadBias(e, half, 0, t);
    cpu_bank->LoadBias(e, half, 0, t);
  }
};

// Rows in host memory, all of whose bytes are 0xff until they are written.
struct HostRowsOf {
  std::vector<char> bytes;
  RowsView view;
  HostRowsOf(int64_t rows, int64_t cols, DType dtype)
      : bytes(static_cast<size_t>(rows * cols) * SizeOf(dtype), '\xff'),
        view{bytes.data(), dtype, rows, cols, cols} {}
};

inline RoutingPlan HostPlan(const DevicePlan& plan) {
  RoutingPlan host = plan.plan;
  host.num_assignments = plan.assignments();
  host.expert_offsets = plan.offsets.data();
  host.expert_of_assignment = plan.expert.data();
  host.row_of_assignment = plan.row.data();
  return host;
}

// Succeeds if the row has the same bits as the expected one; NaN may have any bits.
inline ::testing::AssertionResult SameNumbers(const RowsView& actual, const RowsView& expected,
                                              int64_t row, int64_t cols) {
  if (SameBits(actual, expected, row, row, cols)) return ::testing::AssertionSuccess();
  const std::vector<double> a = RowOf(actual, row, cols), e = RowOf(expected, row, cols);
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == e[i] && std::signbit(a[i]) == std::signbit(e[i])) continue;
    if (std::isnan(a[i]) && std::isnan(e[i])) continue;
    return ::testing::AssertionFailure()
           << "row " << row << ", column " << i << ": " << a[i] << " instead of " << e[i];
  }
  return ::testing::AssertionSuccess();
}

inline std::vector<char> ReadDevice(const void* from, size_t bytes) {
  std::vector<char> host(bytes);
  EXPECT_EQ(cudaMemcpy(host.data(), from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  return host;
}

// Returns rows of normal numbers, of which some are tiny, zero or not finite.
inline std::vector<float> SomeRows(Random& random, int64_t rows, int64_t cols) {
  std::vector<float> values = random.Normals(rows * cols);
  const auto row = [&](int64_t r) { return values.begin() + r * cols; };
  if (rows > 5) {
    *(row(1) + cols / 2) = std::numeric_limits<float>::quiet_NaN();
    *(row(2) + cols - 1) = -std::numeric_limits<float>::infinity();
    std::fill_n(row(3), cols, 0.0f);
    for (int64_t i = 0; i < cols; ++i) row(4)[i] *= 1e-37f;
    for (int64_t i = 0; i < cols; ++i) row(5)[i] *= 1e30f;
  }
  return values;
}

// The rounded rows of a product, and their copies in host memory.
struct RoundedCase {
  cuda::Int8Rows rows;
  std::vector<char> values, scales;

  RoundedCase(const LinearArgs& args, int64_t count) {
    EXPECT_TRUE(rows.Reserve(args).ok());
    const auto bytes = static_cast<size_t>(count * cuda::Int8RowBytes(args));
    EXPECT_EQ(cudaMemset(rows.values(), 0x55, bytes), cudaSuccess);
    cuda::LaunchRoundRows(args, rows, nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    values = ReadDevice(rows.values(), bytes);
    scales = ReadDevice(rows.scales(), static_cast<size_t>(count) * 4);
  }
};

}  // namespace moeserve::testing

// Device rows, routing plans and banks for the tests of the linear kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_bank.h"
#include "tests/reference/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"

namespace moeserve::testing {

inline constexpr cuda::LinearTile kTiles[] = {cuda::LinearTile::kStream8x16,
                                              cuda::LinearTile::kStream8x64,
                                              cuda::LinearTile::kStream32x16,
                                              cuda::LinearTile::kStream32x64,
                                              cuda::LinearTile::kRows8,
                                              cuda::LinearTile::kRows16,
                                              cuda::LinearTile::kRows32,
                                              cuda::LinearTile::kRows64,
                                              cuda::LinearTile::kRows128,
                                              cuda::LinearTile::kWarpgroup128,
                                              cuda::LinearTile::kWarpgroup192,
                                              cuda::LinearTile::kWarpgroup256,
                                              cuda::LinearTile::kWarpgroup192x192,
                                              cuda::LinearTile::kStationary,
                                              cuda::LinearTile::kWarpgroup256Pair,
                                              cuda::LinearTile::kWarpgroup192x192Pair};
inline constexpr cuda::LinearTile kWarpgroupTiles[] = {
    cuda::LinearTile::kWarpgroup128,        cuda::LinearTile::kWarpgroup192,
    cuda::LinearTile::kWarpgroup256,        cuda::LinearTile::kWarpgroup192x192,
    cuda::LinearTile::kStationary,          cuda::LinearTile::kWarpgroup256Pair,
    cuda::LinearTile::kWarpgroup192x192Pair};
// Of products with int8-channel weights.
inline constexpr cuda::LinearTile kInt8Tiles[] = {
    cuda::LinearTile::kStream8x16,   cuda::LinearTile::kStream8x64,
    cuda::LinearTile::kStream32x64,  cuda::LinearTile::kRows8,
    cuda::LinearTile::kRows16,       cuda::LinearTile::kRows32,
    cuda::LinearTile::kRows64,       cuda::LinearTile::kRows128,
    cuda::LinearTile::kWarpgroup128, cuda::LinearTile::kWarpgroup192,
    cuda::LinearTile::kWarpgroup256, cuda::LinearTile::kWarpgroup192x192};

inline int64_t RoundUp16(int64_t n) { return (n + 15) / 16 * 16; }

inline cuda::DeviceMemory Upload(const void* data, size_t bytes) {
  cuda::DeviceMemory memory =
      std::move(cuda::DeviceMemory::Allocate(std::max<size_t>(bytes, 1))).value();
  EXPECT_EQ(cudaMemcpy(memory.data(), data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  return memory;
}

// Rows in device memory. All other memory, including one row before and one after them, is NaN.
class DeviceRows {
 public:
  // `values` [rows, cols] are rounded to `dtype`; if empty, all values are NaN. `shift` is the
  // offset of the first row in elements.
  DeviceRows(int64_t rows, int64_t cols, int64_t stride, DType dtype,
             const std::vector<float>& values = {}, int64_t shift = 0)
      : first_(stride + shift), host_((rows + 2) * stride * SizeOf(dtype) + 64, '\xff') {
    view_ = {nullptr, dtype, rows, cols, stride};
    char* base = host_.data() + first_ * static_cast<int64_t>(SizeOf(dtype));
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const int64_t at = i / cols * stride + i % cols;
      if (dtype == DType::kF32) {
        std::memcpy(base + 4 * at, &values[i], 4);
      } else {
        const Bf16 b = Bf16FromF32(values[i]);
        std::memcpy(base + 2 * at, &b, 2);
      }
    }
    device_ = Upload(host_.data(), host_.size());
    view_.data = device_.as<char>() + first_ * static_cast<int64_t>(SizeOf(dtype));
  }

  const RowsView& view() const { return view_; }

  // Returns a copy in host memory, valid until the next call. Synchronizes with the device.
  RowsView Fetch() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(host_.data(), device_.data(), host_.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    RowsView v = view_;
    v.data = host_.data() + first_ * static_cast<int64_t>(SizeOf(view_.dtype));
    return v;
  }

  // Returns whether every byte outside the first cols[r] columns of the first `rows` rows was
  // unchanged at the last Fetch().
  bool OthersUntouched(int64_t rows, const std::vector<int64_t>& cols) const {
    const int64_t size = static_cast<int64_t>(SizeOf(view_.dtype));
    std::vector<bool> written(host_.size(), false);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (first_ + r * view_.stride) * size;
      std::fill_n(written.begin() + at, cols[r] * size, true);
    }
    for (size_t i = 0; i < host_.size(); ++i) {
      if (!written[i] && host_[i] != '\xff') return false;
    }
    return true;
  }

 private:
  int64_t first_;
  std::vector<char> host_;
  cuda::DeviceMemory device_;
  RowsView view_;
};

// A routing plan on the device, built from the experts of every row. Its arrays have capacity for
// `spare` more assignments, whose entries are not valid rows.
struct DevicePlan {
  std::vector<int32_t> offsets, expert, row;  // [assignments]; offsets [experts + 1]
  cuda::DeviceMemory device_offsets, device_expert, device_row;
  RoutingPlan plan;

  DevicePlan(int experts, const std::vector<std::vector<int>>& routes, int spare) {
    for (int e = 0; e < experts; ++e) {
      offsets.push_back(static_cast<int32_t>(row.size()));
      for (size_t r = 0; r < routes.size(); ++r) {
        if (std::find(routes[r].begin(), routes[r].end(), e) == routes[r].end()) continue;
        expert.push_back(e);
        row.push_back(static_cast<int32_t>(r));
      }
    }
    offsets.push_back(static_cast<int32_t>(row.size()));
    std::vector<int32_t> padded_row = row;
    std::vector<int32_t> padded_expert = expert;
    padded_row.resize(row.size() + static_cast<size_t>(spare), 0x7fffffff);
    padded_expert.resize(padded_row.size(), 0x7fffffff);
    device_offsets = Upload(offsets.data(), offsets.size() * sizeof(int32_t));
    device_expert = Upload(padded_expert.data(), padded_expert.size() * sizeof(int32_t));
    device_row = Upload(padded_row.data(), padded_row.size() * sizeof(int32_t));
    plan.rows = static_cast<int>(routes.size());
    plan.num_experts = experts;
    plan.num_assignments = -1;
    plan.capacity = static_cast<int>(padded_row.size());
    plan.expert_offsets = device_offsets.as<int32_t>();
    plan.expert_of_assignment = device_expert.as<int32_t>();
    plan.row_of_assignment = device_row.as<int32_t>();
  }
  int assignments() const { return static_cast<int>(row.size()); }
};

// Returns a gated activation with a limit, a slope and an offset, as in gpt-oss.
inline Activation GeneralActivation() {
  Activation a = ActivationKind::kSilu;
  a.limit = 0.75f;
  a.slope = 1.702f;
  a.up_offset = 1.0f;
  return a;
}

// A bank and the values of its matrices.
struct BankCase {
  std::unique_ptr<cuda::CudaLinearBank> bank;
  std::vector<Matrix> main, gate;                         // [expert]
  std::vector<std::vector<double>> main_bias, gate_bias;  // empty if there is no bias

  BankCase(std::vector<int> in, std::vector<int> out, bool gated, bool bias, DType dtype,
           Random& random) {
    LinearBankShape shape{std::move(in), std::move(out), gated, bias, dtype};
    bank = std::move(cuda::CudaLinearBank::Create(shape)).value();
    for (int e = 0; e < bank->num_experts(); ++e) {
      main.push_back(LoadHalf(LinearBank::Half::kMain, e, random));
      main_bias.push_back(LoadBias(LinearBank::Half::kMain, e, random));
      if (!gated) continue;
      gate.push_back(LoadHalf(LinearBank::Half::kGate, e, random));
      gate_bias.push_back(LoadBias(LinearBank::Half::kGate, e, random));
    }
  }

  // Returns the expected outputs before rounding.
  std::vector<double> Expected(int e, const std::vector<double>& x, const Activation& kind) const {
    std::vector<double> y = OracleLinear(x, main[e], main_bias[e]);
    if (!bank->shape().gated) {
      for (double& v : y) v = OracleActivation(kind.kind, v);
      return y;
    }
    const std::vector<double> g = OracleLinear(x, gate[e], gate_bias[e]);
    for (size_t i = 0; i < y.size(); ++i) y[i] = OracleGated(kind, g[i], y[i]);
    return y;
  }

 private:
  // Loads the matrix in two parts, as loaders of stacked tensors do.
  Matrix LoadHalf(LinearBank::Half half, int e, Random& random) {
    const int in = bank->shape().in_features_of(e);
    const int out = bank->shape().out_features[e];
    Matrix m;
    const int first = out / 3;
    for (const auto& [begin, count] : {std::pair{0, first}, std::pair{first, out - first}}) {
      if (count == 0) continue;
      const HostTensor t = MakeTensor(random.Normals(int64_t{count} * in, 1.0 / std::sqrt(in)),
                                      {count, in}, bank->shape().weight_dtype);
      bank->LoadWeight(e, half, begin, t);
      for (int r = 0; r < count; ++r) {
        m.emplace_back();
        for (int k = 0; k < in; ++k) m.back().push_back(ElementAsF32(t, int64_t{r} * in + k));
      }
    }
    return m;
  }

  std::vector<double> LoadBias(LinearBank::Half half, int e, Random& random) {
    std::vector<double> values;
    if (!bank->shape().bias) return values;
    const int out = bank->shape().out_features[e];
    const HostTensor t = MakeTensor(random.Normals(out), {out});
    bank->LoadBias(e, half, 0, t);
    for (int i = 0; i < out; ++i) values.push_back(ElementAsF32(t, i));
    return values;
  }
};

inline bool SameBits(const RowsView& a, const RowsView& b, int64_t row_a, int64_t row_b,
                     int64_t cols) {
  return std::memcmp(a.row(row_a), b.row(row_b), static_cast<size_t>(cols) * SizeOf(a.dtype)) == 0;
}

}  // namespace moeserve::testing

// Shared by the tests of routing on the device: cases, routing plans on the host.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/cuda/routing/router.h"
#include "kernels/registry.h"
#include "tests/cuda/device_array.h"
#include "tests/support/gate_settings.h"
#include "tests/support/random.h"

namespace moeserve::cuda {

using Gate = GateKind;
using Score = ScoreKind;
using Temperature = TemperatureKind;
using testing::MakeTensor;
using testing::Random;

template <typename T>
std::vector<T> FromDevice(const T* data, size_t n) {
  std::vector<T> v(n);
  EXPECT_EQ(cudaMemcpy(v.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
  return v;
}

// A routing plan in host memory; weights are stored as bits.
struct HostPlan {
  std::vector<int32_t> expert_offsets, expert_of_assignment, row_of_assignment, row_offsets,
      assignments_of_row;
  std::vector<uint32_t> weights;
  std::vector<uint8_t> row_nonfinite;

  bool operator==(const HostPlan&) const = default;
};

inline HostPlan FromCpu(const RoutingPlan& p) {
  const size_t a = static_cast<size_t>(p.num_assignments), rows = static_cast<size_t>(p.rows);
  HostPlan h;
  h.expert_offsets.assign(p.expert_offsets, p.expert_offsets + p.num_experts + 1);
  h.expert_of_assignment.assign(p.expert_of_assignment, p.expert_of_assignment + a);
  h.row_of_assignment.assign(p.row_of_assignment, p.row_of_assignment + a);
  for (size_t i = 0; i < a; ++i) h.weights.push_back(BitsFromF32(p.weight_of_assignment[i]));
  h.row_offsets.assign(p.row_offsets, p.row_offsets + rows + 1);
  h.assignments_of_row.assign(p.assignments_of_row, p.assignments_of_row + a);
  h.row_nonfinite.assign(p.row_nonfinite, p.row_nonfinite + rows);
  return h;
}

inline HostPlan FromCuda(const RoutingPlan& p) {
  EXPECT_EQ(p.num_assignments, -1);
  const size_t rows = static_cast<size_t>(p.rows);
  HostPlan h;
  h.expert_offsets = FromDevice(p.expert_offsets, static_cast<size_t>(p.num_experts) + 1);
  const size_t a = static_cast<size_t>(h.expert_offsets.back());
  EXPECT_LE(h.expert_offsets.back(), p.capacity);
  if (h.expert_offsets.back() < 0 || h.expert_offsets.back() > p.capacity) return h;
  h.expert_of_assignment = FromDevice(p.expert_of_assignment, a);
  h.row_of_assignment = FromDevice(p.row_of_assignment, a);
  for (float w : FromDevice(p.weight_of_assignment, a)) h.weights.push_back(BitsFromF32(w));
  h.row_offsets = FromDevice(p.row_offsets, rows + 1);
  h.assignments_of_row = FromDevice(p.assignments_of_row, a);
  h.row_nonfinite = FromDevice(p.row_nonfinite, rows);
  return h;
}

inline void ExpectSame(const HostPlan& device, const HostPlan& cpu) {
  ASSERT_EQ(device.expert_offsets, cpu.expert_offsets);
  ASSERT_EQ(device.row_offsets, cpu.row_offsets);
  ASSERT_EQ(device.expert_of_assignment, cpu.expert_of_assignment);
  ASSERT_EQ(device.row_of_assignment, cpu.row_of_assignment);
  ASSERT_EQ(device.assignments_of_row, cpu.assignments_of_row);
  ASSERT_EQ(device.weights, cpu.weights);
  ASSERT_EQ(device.row_nonfinite, cpu.row_nonfinite);
}

// Returns the routes of a plan without the rows marked in `dropped`.
inline GivenRoutes Without(const HostPlan& p, const std::vector<bool>& dropped) {
  GivenRoutes g;
  g.offsets.push_back(0);
  for (size_t r = 0; r + 1 < p.row_offsets.size(); ++r) {
    for (int32_t i = p.row_offsets[r]; !dropped[r] && i < p.row_offsets[r + 1]; ++i) {
      const size_t a = static_cast<size_t>(p.assignments_of_row[static_cast<size_t>(i)]);
      g.experts.push_back(p.expert_of_assignment[a]);
      g.weights.push_back(F32FromBits(p.weights[a]));
    }
    g.offsets.push_back(static_cast<int32_t>(g.experts.size()));
  }
  return g;
}

struct RouteCase {
  RouteSettings settings;
  RouterTensors tensors;
  uint64_t seed = 0;
};

// The number of rows of the tables of routers.
inline constexpr int kVocabulary = 11;

// Changes the rows before the scores and multiplies the weights of experts. With `table`, the
// experts come from a table.
inline void AddRareSettings(RouteCase& c, bool table) {
  Random random(c.seed + 4000);
  RouteSettings& s = c.settings;
  s.row_norm = static_cast<RowNorm>(random.Below(3));
  s.norm_eps = 1e-3f;
  s.row_scale = random.Below(2) == 1 ? 0.37f : 1.0f;
  s.expert_scale = random.Below(3) != 0;
  if (s.row_norm == RowNorm::kRmsWeight) {
    c.tensors.row_weight = MakeTensor(random.Normals(s.input_width), {s.input_width});
  }
  if (s.expert_scale) {
    c.tensors.expert_scale = MakeTensor(random.Normals(s.num_experts), {s.num_experts});
  }
  if (!table) return;
  s.select = SelectKind::kTable;
  s.choice_bias = false;
  s.groups = s.best_groups = 1;
  std::vector<int32_t> all(static_cast<size_t>(s.num_experts));
  std::iota(all.begin(), all.end(), 0);
  for (int token = 0; token < kVocabulary; ++token) {
    for (int i = 0; i < s.k; ++i) {
      std::swap(all[static_cast<size_t>(i)],
                all[static_cast<size_t>(i + random.Below(s.num_experts - i))]);
    }
    c.tensors.table.insert(c.tensors.table.end(), all.begin(), all.begin() + s.k);
  }
}

// Gives the router random tensors of cosine scores with vectors of `dim` elements, or of dot scores
// if `dim` is 0.
inline void SetScores(RouteCase& c, int dim, Random& random, DType dtype, bool bias) {
  RouteSettings& s = c.settings;
  const int experts = s.num_experts, width = s.input_width;
  if (dim > 0) {
    s.score = Score::kCosine;
    s.dim = dim;
    s.normalize_row = random.Below(3) != 0;
    s.normalize_expert = random.Below(3) != 0;
    s.temperature = static_cast<Temperature>(random.Below(3));
    c.tensors.temperature = static_cast<float>(random.Normal());
    std::vector<float> w = random.Normals(int64_t{experts} * s.dim);
    // The direction vector of expert 2 is zero.
    if (experts > 2) std::fill(w.begin() + 2 * s.dim, w.begin() + 3 * s.dim, 0.0f);
    c.tensors.weight = MakeTensor(w, {experts, s.dim}, dtype);
    c.tensors.projection = MakeTensor(
        random.Normals(int64_t{s.dim} * width, 1.0 / std::sqrt(width)), {s.dim, width}, dtype);
    if (bias) c.tensors.bias = MakeTensor(random.Normals(s.dim, 0.1), {s.dim});
    return;
  }
  std::vector<float> w = random.Normals(int64_t{experts} * width, 2.0 / std::sqrt(width));
  // Experts 1 and 3 are equal and tie in every row.
  for (int i = 0; i < width && experts > 4; ++i) w[3 * width + i] = w[1 * width + i];
  c.tensors.weight = MakeTensor(w, {experts, width}, dtype);
  if (bias) {
    std::vector<float> b = random.Normals(experts);
    if (experts > 4) b[3] = b[1];
    const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                         -std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::infinity()};
    const int which = random.Below(12);
    if (experts > 2 && which < 3) b[2] = odd[which];
    c.tensors.bias = MakeTensor(b, {experts});
  }
}

inline RouteCase MakeCase(int experts, int width, Gate gate, uint64_t seed) {
  RouteCase c;
  c.seed = seed;
  Random random(seed);
  RouteSettings& s = c.settings;
  s.num_experts = experts;
  s.input_width = width;
  testing::SetGate(s, gate);
  s.k = random.Below(3) == 0 ? 1 + random.Below(experts) : 1 + random.Below(std::min(experts, 8));
  s.select = gate != Gate::kSoftmaxSelected && random.Below(2) == 1 ? SelectKind::kTopP
                                                                    : SelectKind::kTopK;
  s.p = static_cast<float>(random.Uniform() * 1.2);
  if (random.Below(4) == 0) s.p = random.Below(2) == 0 ? 1e-30f : 1.0f;
  s.compare = random.Below(2) == 1 ? TopPCompare::kGt : TopPCompare::kGe;
  s.renormalize = random.Below(2) == 1;
  s.scale = random.Below(3) == 0 ? 2.5f : 1.0f;
  // A sparse mixer ranks experts by their scores alone.
  if (random.Below(2) == 1 && gate != Gate::kSparseMixer) {
    s.choice_bias = random.Below(2) == 1;
    for (int g = 2; g <= kMaxExpertGroups; ++g) {
      if (experts % g == 0 && random.Below(2) == 1) s.groups = g;
    }
    s.best_groups = 1 + random.Below(s.groups);
    const int size = experts / s.groups;
    s.group_score =
        size > 1 && random.Below(2) == 1 ? GroupScoreKind::kSumOfTwo : GroupScoreKind::kMax;
    s.group_mask = random.Below(2) == 1 ? GroupMaskKind::kZero : GroupMaskKind::kMinusInfinity;
    s.k = std::min(s.k, size * s.best_groups);
    if (s.choice_bias) {
      c.tensors.choice_bias = MakeTensor(random.Normals(experts, 0.3), {experts});
    }
  }
  const DType dtype = random.Below(2) == 0 ? DType::kF32 : DType::kBF16;
  const bool bias = random.Below(2) == 1;
  int dim = 0;
  if (random.Below(3) == 0) {
    dim = random.Below(4) == 0 ? 250 + random.Below(60) : 1 + random.Below(40);
  }
  SetScores(c, dim, random, dtype, bias);
  return c;
}

// Returns a case with cosine scores of `dim` elements, or with dot scores if `dim` is 0.
inline RouteCase MakeScoreCase(int experts, int width, int dim, uint64_t seed) {
  RouteCase c = MakeCase(experts, width, Gate::kSoftmax, seed);
  c.settings.score = Score::kDot;
  c.settings.dim = 0;
  c.tensors.projection = c.tensors.bias = {};
  Random random(seed + 5000);
  SetScores(c, dim, random, seed % 2 == 0 ? DType::kF32 : DType::kBF16, seed % 3 != 0);
  return c;
}

// Returns random rows, some of which are zero, huge, tiny or not finite.
inline std::vector<float> MakeRows(int rows, int width, Random& random, bool bf16) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> v = random.Normals(int64_t{rows} * width);
  for (int r = 0; r < rows; ++r) {
    float* row = v.data() + static_cast<size_t>(r) * static_cast<size_t>(width);
    const int kind = random.Below(16);
    const float fill[] = {0.0f, -0.0f, 3e38f, 1e-42f};
    if (kind < 4) std::fill(row, row + width, fill[kind]);
    if (kind == 4) row[random.Below(width)] = std::numeric_limits<float>::quiet_NaN();
    if (kind == 5) row[random.Below(width)] = kInf;
    if (kind == 6) row[random.Below(width)] = -kInf;
  }
  if (bf16) {
    for (float& f : v) f = F32FromBf16(Bf16FromF32(f));
  }
  return v;
}

// Rows in device memory, in f32 or bf16, with unused elements between them.
class DeviceRows {
 public:
  DeviceRows(const std::vector<float>& values, int width, int64_t stride, bool bf16)
      : rows_(static_cast<int64_t>(values.size()) / width),
        width_(width),
        stride_(stride),
        bf16_(bf16),
        bytes_(static_cast<size_t>(rows_ * stride) * (bf16 ? 2 : 4)) {
    Write(values);
  }
  void Write(const std::vector<float>& values) {
    std::vector<uint8_t> bytes(static_cast<size_t>(rows_ * stride_) * (bf16_ ? 2 : 4), 0xff);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t i = 0; i < width_; ++i) {
        const float f = values[static_cast<size_t>(r * width_ + i)];
        if (bf16_) {
          const Bf16 b = Bf16FromF32(f);
          std::memcpy(bytes.data() + (r * stride_ + i) * 2, &b, 2);
        } else {
          std::memcpy(bytes.data() + (r * stride_ + i) * 4, &f, 4);
        }
      }
    }
    bytes_.Write(bytes);
  }
  RowsView view() const {
    return {bytes_.data(), bf16_ ? DType::kBF16 : DType::kF32, rows_, width_, stride_};
  }

 private:
  int64_t rows_, width_, stride_;
  bool bf16_;
  DeviceArray<uint8_t> bytes_;
};

inline std::unique_ptr<Backend> MakeCpu() {
  return std::move(CreateBackend({.device = "cpu", .threads = 1})).value();
}

inline RoutingPlan RouteOnCpu(Backend& cpu, const RouteCase& c, std::vector<float>& rows,
                              std::vector<float>* scores,
                              std::span<const RouteOverride> overrides = {}) {
  const int width = c.settings.input_width, experts = c.settings.num_experts;
  const int64_t count = static_cast<int64_t>(rows.size()) / width;
  const auto router = std::move(cpu.NewRouter(c.settings, c.tensors)).value();
  scores->assign(static_cast<size_t>(count * experts), 0.0f);
  const RowsView kept{scores->data(), DType::kF32, count, experts, experts};
  return cpu.Route({.router = router.get(),
                    .input = {rows.data(), DType::kF32, count, width, width},
                    .scores = &kept,
                    .overrides = overrides});
}

inline void ExpectSameScores(const std::vector<float>& device, int64_t stride,
                             const std::vector<float>& cpu, int experts,
                             const std::vector<bool>& padding) {
  for (size_t r = 0; r < padding.size(); ++r) {
    for (size_t e = 0; e < static_cast<size_t>(stride); ++e) {
      const float d = device[r * static_cast<size_t>(stride) + e];
      if (padding[r] || e >= static_cast<size_t>(experts)) {
        ASSERT_EQ(BitsFromF32(d), 0xffffffffu) << "row " << r << " column " << e << " was written";
        continue;
      }
      const float c = cpu[r * static_cast<size_t>(experts) + e];
      if (std::isnan(c) && std::isnan(d)) continue;
      ASSERT_EQ(BitsFromF32(d), BitsFromF32(c)) << "row " << r << " expert " << e;
    }
  }
}

}  // namespace moeserve::cuda

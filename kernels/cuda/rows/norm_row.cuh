// The norm of a row, alone or together with the sum of a residual branch, by a team of threads
// (norm.cuh). Kernels that do more than norms include it, so that their rows have the bits of
// LaunchNorm().
#pragma once

#include "base/check.h"
#include "kernels/cuda/rows/norm.cuh"
#include "kernels/cuda/rows/row_access.cuh"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {

struct CombineParams {
  const int32_t* row_offsets = nullptr;
  const int32_t* assignments_of_row = nullptr;
  const float* weights = nullptr;  // null: all are 1
  Rows results = {};
  Rows residual = {};  // null data if there is none
  Rows output = {};
  int cols = 0;
};

struct NormParams {
  bool layer;
  float eps;
  const float* scales;
  const float* shifts;
  const int32_t* group_begin;
  const int32_t* expert_of_row;  // null: every row uses group 0
  const int32_t* valid_rows;     // number of rows to process, in device memory; null: all rows
  int rows;
  int width;  // used if expert_of_row is null
  int segments;
  int parts;  // NormShape::parts; a part of a vector is a segment
  Rows input;
  Rows output;
  Rows branch;        // null data if there is none
  CombineParams sum;  // in place of the branch's rows; only with kSum
  const float* bias;
  float scale;
};

// Adds up columns of a row in the order of CombineKernel. `columns(add)` must call add(sum, c,
// count) for the sums of each group of four columns: the first is column c, and `count` of them
// exist.
template <typename Columns>
__device__ __forceinline__ void SumRow(const CombineParams& p, int64_t row,
                                       const Columns& columns) {
  if (p.residual.data != nullptr) {
    columns([&](float4& sum, int c, int count) { sum = LoadRowFour(p.residual, row, c, count); });
  }
  const int32_t end = p.row_offsets[row + 1];
  for (int32_t i = p.row_offsets[row]; i < end; ++i) {
    const int32_t a = p.assignments_of_row[i];
    const float weight = p.weights == nullptr ? 1.0f : p.weights[a];
    columns([&](float4& sum, int c, int count) {
      sum = MultiplyAdd(weight, LoadRowFour(p.results, a, c, count), sum);
    });
  }
}

// Where NormVectorOf() writes a row: the sum replaces the residual stream, and the normed row is
// the output.
struct NormInPlace {
  // Returns where the sum of the row at `x` is stored, in global or shared memory.
  __device__ __forceinline__ float* Sum(float* x) const { return x; }
  // Stores the first `count` of the normed elements from column c on.
  __device__ __forceinline__ void Store(const NormParams& p, int64_t row, int64_t c, int count,
                                        const float4& v) const {
    StoreRowFour(p.output, row, c, count, v);
  }
};

// Computes vector `item` of the rows; `lane` is the thread's index in its team. All loads are
// issued before the first loaded value is used, and a row is read once. With kBlock, all threads of
// the block call this, those of teams without a vector with a negative item; a team has kNormBlock
// threads. `shared` is that of FactorsOf(). `to` has the functions of NormInPlace.
template <bool kBlock, bool kSum, typename Place = NormInPlace>
__device__ __forceinline__ void NormVectorOf(const NormParams& p, int64_t item, int lane,
                                             float* shared, const Place& to = Place{}) {
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const bool idle = item < 0;
  if (idle) item = 0;
  const int64_t row = item / p.segments;
  int begin = 0, n = p.width;
  if (p.expert_of_row != nullptr) {
    const int group = p.expert_of_row[row];
    begin = p.group_begin[group];
    n = p.group_begin[group + 1] - begin;
  }
  if (p.parts > 1) begin = static_cast<int>(item % p.parts) * n;
  if (idle) n = 0;
  const int64_t first = item % p.segments * n;
  const auto start = [&](const Rows& rows) {
    return reinterpret_cast<float*>(rows.data) + row * rows.stride + first;
  };
  NormVector vector;
  vector.x = start(p.input);
  vector.n = n;
  vector.lane = lane;
  vector.threads = kTeam;
  vector.aligned = Aligned16(vector.x);
  vector.Load();
  const float* scales = p.scales + begin;
  float4 scale[NormVector::kHeld] = {};
  vector.Load(scales, scale);
  const auto other = [n](const float* from, int c) {
    return LoadFour(from + c, n - c, Aligned16(from));
  };
  if (kSum || p.branch.data != nullptr) {
    const float* branch = start(p.branch);
    const float* bias = p.bias == nullptr ? nullptr : p.bias + first;
    float4 sums[NormVector::kHeld] = {}, biases[NormVector::kHeld] = {};
    if constexpr (kSum) {
      SumRow(p.sum, row, [&](const auto& add) {
#pragma unroll
        for (int j = 0; j < NormVector::kHeld; ++j) {
          const int c = 4 * (vector.lane + j * kTeam);
          if (c < n) add(sums[j], c, n - c);
        }
      });
    } else {
      vector.Load(branch, sums);
    }
    const auto other_sum = [&](int c) {
      if constexpr (!kSum) return other(branch, c);
      float4 sum = {};
      SumRow(p.sum, row, [&](const auto& add) { add(sum, c, n - c); });
      return sum;
    };
    if (bias != nullptr) vector.Load(bias, biases);
    float* const stored = to.Sum(vector.x);
    const bool aligned = Aligned16(stored);
    vector.ForFours([&](int j, int c, float4& x) {
      const bool held = j < NormVector::kHeld;
      float4 v = held ? sums[j] : other_sum(c);
      if (bias != nullptr) v = v + (held ? biases[j] : other(bias, c));
      x = x + p.scale * v;
      StoreFour(stored + c, n - c, aligned, x);
    });
    vector.x = stored;
    vector.aligned = aligned;
  }
  const NormFactors factors = FactorsOf<kBlock>(vector, n, p.layer, p.eps, shared);
  vector.ForFours([&](int j, int c, const float4& x) {
    float4 v = factors(x, j < NormVector::kHeld ? scale[j] : other(scales, c));
    if (p.shifts != nullptr) v = v + other(p.shifts + begin, c);
    to.Store(p, row, first + c, n - c, v);
  });
}

inline CombineParams CombineParamsOf(const CombineArgs& args) {
  const RoutingPlan& plan = *args.plan;
  MOESERVE_CHECK(args.output.rows == plan.rows, "rows of plan and sum");
  return {plan.row_offsets,
          plan.assignments_of_row,
          args.weighted ? plan.weight_of_assignment : nullptr,
          RowsOf(args.results),
          RowsOf(args.residual == nullptr ? RowsView{} : *args.residual),
          RowsOf(args.output),
          static_cast<int>(args.output.cols)};
}

// Returns the arguments of NormVectorOf() for a launch.
inline NormParams NormParamsOf(const NormLaunch& args) {
  MOESERVE_CHECK(args.input.dtype == DType::kF32, "norms read f32 rows");
  const int parts = args.shape.parts;
  MOESERVE_CHECK(parts == 1 || args.plan == nullptr, "norms of experts have one part");
  const int width = args.width / parts;
  const int segments = args.segments * parts;
  NormParams p{args.shape.layer,
               args.shape.eps,
               args.scales,
               args.shifts,
               args.group_begin,
               args.plan == nullptr ? nullptr : args.plan->expert_of_assignment,
               args.plan == nullptr ? nullptr : args.plan->expert_offsets + args.plan->num_experts,
               static_cast<int>(args.input.rows),
               width,
               segments,
               parts,
               RowsOf(args.input),
               RowsOf(args.output),
               RowsOf(args.branch),
               {},
               args.bias,
               args.scale};
  if (args.sum != nullptr) {
    MOESERVE_CHECK(args.plan == nullptr && segments == 1, "norms of sums have one vector per row");
    p.sum = CombineParamsOf(*args.sum);
  }
  return p;
}

}  // namespace moeserve::cuda

// Scores of a cosine router: dot products of a row's projection with the expert vectors, in the
// order of operations of kernels/base/routing.h.
#pragma once

#include "kernels/base/routing.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

// Starts copies of the expert vectors to shared memory; the caller commits them.
__device__ __forceinline__ void CopyExpertTable(const RouterTables& router, char* table) {
  const int chunks = (router.settings.dim * router.settings.num_experts + 3) / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    CopyAsync16(table + int64_t{i} * 16, router.experts + int64_t{i} * 4);
  }
}

// Adds the products of elements begin to begin + 7 of the expert vectors and of u, in ascending
// order, to the sums; element at[j] of a table's row belongs to sum j. u is in shared memory,
// 16-byte aligned; the table [dim][experts] is in shared memory or, without kShared, in global
// memory.
template <bool kShared, int kSlots>
__device__ __forceinline__ void AddGroup(const float* table, int experts, const int (&at)[kSlots],
                                         const float* u, int begin, int dim, float (&sum)[kSlots]) {
  const float* row = table + int64_t{begin} * experts;
  const auto add = [&](float x) {
    float w[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) w[j] = kShared ? row[at[j]] : __ldg(row + at[j]);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) sum[j] = fmaf(w[j], x, sum[j]);
    row += experts;
  };
  if (begin + kRoutingGroup <= dim) {
    const float4 low = *reinterpret_cast<const float4*>(u + begin);
    const float4 high = *reinterpret_cast<const float4*>(u + begin + 4);
    add(low.x), add(low.y), add(low.z), add(low.w);
    add(high.x), add(high.y), add(high.z), add(high.w);
  } else {
#pragma unroll 1
    for (int i = begin; i < dim; ++i) add(u[i]);
  }
}

// The tree of sums over partial sums has at most this many levels.
inline constexpr int kTreeLevels = 5;
static_assert(1 << kTreeLevels == kRoutingLanes);

// Adds the pending sums of the levels at which `visit` completes a pair, from kLevel on; stores the
// result at the first level at which it does not.
template <int kLevel, int kLevels, int kSlots>
__device__ __forceinline__ void MergeSums(int visit, float (&pending)[kLevels][kSlots],
                                          float (&sum)[kSlots]) {
  if constexpr (kLevel < kLevels) {
    if ((visit >> kLevel & 1) != 0) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) sum[j] = pending[kLevel][j] + sum[j];
      MergeSums<kLevel + 1>(visit, pending, sum);
    } else {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) pending[kLevel][j] = sum[j];
    }
  }
}

// Returns in dot[j] the dot product of u with column at[j] of the table, with the bits of
// ContractDot(). A thread computes all partial sums of its columns, in the order in which the tree
// of ContractTreeSum() combines them, so that at most kLevels sums per column are pending, where at
// most 2^kLevels partial sums have elements. Partial sums without elements are +0; adding them to
// another sum changes only -0, to +0. The tree stops at the partial sums that have elements.
template <bool kShared, int kLevels, int kSlots>
__device__ __forceinline__ void ColumnDots(const float* table, int experts, const int (&at)[kSlots],
                                           const float* u, int dim, float (&dot)[kSlots]) {
  const int groups = (dim + kRoutingGroup - 1) / kRoutingGroup;
  const int levels = min(32 - __clz(groups - 1), kLevels);
  // Adding -0 changes nothing.
  const float missing = levels < kTreeLevels ? 0.0f : -0.0f;
  float pending[kLevels][kSlots];
#pragma unroll 1
  for (int visit = 0; visit < 1 << levels; ++visit) {
    const int first = levels == 0 ? 0 : static_cast<int>(__brev(visit) >> (32 - levels));
#pragma unroll
    for (int j = 0; j < kSlots; ++j) dot[j] = 0.0f;
    if constexpr (kLevels < kTreeLevels) {
      AddGroup<kShared>(table, experts, at, u, first * kRoutingGroup, dim, dot);
    } else {
#pragma unroll 1
      for (int begin = first * kRoutingGroup; begin < dim; begin += kRouterStep) {
        AddGroup<kShared>(table, experts, at, u, begin, dim, dot);
      }
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) dot[j] = dot[j] + missing;
    MergeSums<0>(visit, pending, dot);
  }
}

// Divides the row u [n] in shared memory by its length.
__device__ __forceinline__ void NormaliseRow(float* u, int n, float eps, int lane) {
  float sum = 0.0f;
#pragma unroll 1
  for (int begin = lane * kRoutingGroup; begin < n; begin += kRouterStep) {
    ForGroup(u, begin, n, [&](float v) { sum = fmaf(v, v, sum); });
  }
  const float divisor = NormDivisor(WarpTreeSum(sum), eps);
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < n; i += 32) u[i] /= divisor;
  __syncwarp();
}

// Stores the row's projection, normalised if the settings ask for it, in u, 16-byte aligned shared
// memory.
__device__ __forceinline__ void ReadProjection(const RouteSettings& s, const RowProducts& products,
                                               float* u, int lane) {
#pragma unroll 2
  for (int i = lane; i < s.dim; i += 32) u[i] = products[i];
  __syncwarp();
  if (s.normalize_row) NormaliseRow(u, s.dim, s.eps, lane);
}

}  // namespace moeserve::cuda

// Products of a tile of rows with a tile of router columns in the order of operations of
// kernels/base/routing.h: lane l of a warp adds the groups of 8 elements l, l + 32, ... in
// ascending order with fused multiply-adds; the 32 partial sums are added as a tree (for w = 16, 8,
// 4, 2, 1, lane l + w is added to lane l). The result of a row does not depend on its tile.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

// The dimensions of a tile. A warp computes kRowTile x kColumnTile products; a block has kRowWarps
// x kColumnWarps warps, and kStages steps of kRouterStep elements are in flight.
template <typename T_, int kRowTile_, int kColumnTile_, int kRowWarps_, int kColumnWarps_,
          int kStages_>
struct ProductTile {
  using T = T_;  // float or Bf16
  static constexpr int kRowTile = kRowTile_, kColumnTile = kColumnTile_;
  static constexpr int kRowWarps = kRowWarps_, kColumnWarps = kColumnWarps_;
  static constexpr int kStages = kStages_;
  static constexpr int kRows = kRowTile * kRowWarps;
  static constexpr int kColumns = kColumnTile * kColumnWarps;
  static constexpr int kWarps = kRowWarps * kColumnWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWeightBytes = kColumns * kRouterStep * 4;
  static constexpr int kRowBytes = kRouterStep * static_cast<int>(sizeof(T));
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(kRouterColumns % kColumns == 0 && kRows >= kFewestTileRows);
};

struct ProductArgs {
  const void* input = nullptr;
  int64_t stride = 0;
  bool aligned = false;  // every row starts at a multiple of 16 bytes
  int rows = 0;
  int width = 0;
  const float* weights = nullptr;
  int64_t padded = 0;
  int columns = 0;
  const float* bias = nullptr;
  float* products = nullptr;  // [rows, columns]
};

template <typename Tile>
__device__ __forceinline__ void CopyWeights(const ProductArgs& a, int first_column, int64_t begin,
                                            char* stage) {
  constexpr int kChunks = kRouterStep * 4 / 16;
  const float* from = a.weights + first_column * a.padded + begin;
  // The loop is not unrolled, because the addresses would take registers that the sums need.
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < Tile::kColumns * kChunks;
       index += Tile::kThreads) {
    const int column = index / kChunks, chunk = index % kChunks;
    CopyAsync16(stage + column * kRouterStep * 4 + chunk * 16,
                from + column * a.padded + chunk * 4);
  }
}

// Copies one step of the rows. Rows and elements out of range become zeros. In f32, a lane's group
// of 8 elements has two 16-byte chunks, which are stored in two separate planes, so that the lanes
// of a warp read adjacent chunks.
template <typename Tile>
__device__ __forceinline__ void CopyRows(const ProductArgs& a, int first_row, int64_t begin,
                                         char* stage) {
  using T = typename Tile::T;
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(T));
  constexpr int kChunks = kRouterStep / kPerChunk;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < Tile::kRows * kChunks;
       index += Tile::kThreads) {
    const int row = index / kChunks, chunk = index % kChunks;
    const int place = sizeof(T) == 2 ? chunk : chunk % 2 * 32 + chunk / 2;
    char* to = stage + Tile::kWeightBytes + row * Tile::kRowBytes + place * 16;
    const int64_t element = begin + chunk * kPerChunk;
    int64_t left = first_row + row < a.rows ? a.width - element : 0;
    left = left < 0 ? 0 : left < kPerChunk ? left : kPerChunk;
    const T* from = static_cast<const T*>(a.input);
    if (left > 0) from += (first_row + row) * a.stride + element;
    if (a.aligned) {
      CopyAsync16(to, from, static_cast<int>(left) * static_cast<int>(sizeof(T)));
    } else {
      T* values = reinterpret_cast<T*>(to);
#pragma unroll
      for (int j = 0; j < kPerChunk; ++j) values[j] = j < left ? from[j] : T{0};
    }
  }
}

__device__ __forceinline__ uint32_t PairWord(const uint4& v, int q) {
  return q == 0 ? v.x : q == 1 ? v.y : q == 2 ? v.z : v.w;
}

template <typename Tile>
__device__ __forceinline__ void AddStep(const char* stage, int row_warp, int column_warp, int lane,
                                        float (&sums)[Tile::kRowTile * Tile::kColumnTile]) {
  using T = typename Tile::T;
  const float* weights =
      reinterpret_cast<const float*>(stage) + column_warp * Tile::kColumnTile * kRouterStep;
  const char* rows = stage + Tile::kWeightBytes + row_warp * Tile::kRowTile * Tile::kRowBytes;
  [[maybe_unused]] uint4 packed[Tile::kRowTile];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int m = 0; m < Tile::kRowTile; ++m) {
      packed[m] = *reinterpret_cast<const uint4*>(rows + m * Tile::kRowBytes + lane * 16);
    }
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    float2 x[Tile::kRowTile];
#pragma unroll
    for (int m = 0; m < Tile::kRowTile; ++m) {
      if constexpr (sizeof(T) == 2) {
        const uint32_t pair = PairWord(packed[m], q);
        x[m].x = F32FromBits(pair << 16);
        x[m].y = F32FromBits(pair & 0xffff0000u);
      } else {
        x[m] = *reinterpret_cast<const float2*>(rows + m * Tile::kRowBytes +
                                                (q / 2 * 32 + lane) * 16 + q % 2 * 8);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::kColumnTile; ++n) {
      const float2 w =
          *reinterpret_cast<const float2*>(weights + n * kRouterStep + q * 64 + lane * 2);
#pragma unroll
      for (int m = 0; m < Tile::kRowTile; ++m) {
        float& sum = sums[m * Tile::kColumnTile + n];
        sum = fmaf(x[m].x, w.x, sum);
        sum = fmaf(x[m].y, w.y, sum);
      }
    }
  }
}

// Computes the tile's products and stores them in global memory. After a barrier, `memory` can be
// used for other data.
template <typename Tile>
__device__ __forceinline__ void TileProducts(const ProductArgs& a, int first_row, int first_column,
                                             char* memory) {
  constexpr int kSums = Tile::kRowTile * Tile::kColumnTile;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int row_warp = warp / Tile::kColumnWarps, column_warp = warp % Tile::kColumnWarps;
  const int steps = static_cast<int>(a.padded / kRouterStep);
  // Copies of weights start before GridDependencyPass(), because weights do not depend on earlier
  // kernels.
#pragma unroll
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    if (s < steps) {
      CopyWeights<Tile>(a, first_column, int64_t{s} * kRouterStep, memory + s * Tile::kStageBytes);
    }
  }
  GridDependencyPass();
#pragma unroll
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    if (s < steps) {
      CopyRows<Tile>(a, first_row, int64_t{s} * kRouterStep, memory + s * Tile::kStageBytes);
    }
    CopyAsyncCommit();
  }
  float sums[kSums] = {};
  for (int step = 0; step < steps; ++step) {
    CopyAsyncWait<Tile::kStages - 2>();
    __syncthreads();
    const int next = step + Tile::kStages - 1;
    if (next < steps) {
      char* stage = memory + next % Tile::kStages * Tile::kStageBytes;
      CopyWeights<Tile>(a, first_column, int64_t{next} * kRouterStep, stage);
      CopyRows<Tile>(a, first_row, int64_t{next} * kRouterStep, stage);
    }
    CopyAsyncCommit();
    AddStep<Tile>(memory + step % Tile::kStages * Tile::kStageBytes, row_warp, column_warp, lane,
                  sums);
  }
  SpreadTreeSums<kSums>(sums, lane);
  constexpr int kShare = kSums < 32 ? 32 / kSums : 1;
  if (lane % kShare != 0) return;
#pragma unroll
  for (int i = 0; i < (kSums + 31) / 32; ++i) {
    const int index = TreeSumIndex<kSums>(lane) + i;
    const int row = first_row + row_warp * Tile::kRowTile + index / Tile::kColumnTile;
    const int column = first_column + column_warp * Tile::kColumnTile + index % Tile::kColumnTile;
    if (row >= a.rows || column >= a.columns) continue;
    float v = sums[i];
    if (a.bias != nullptr) v = v + a.bias[column];
    a.products[int64_t{row} * a.columns + column] = v;
  }
}

}  // namespace moeserve::cuda

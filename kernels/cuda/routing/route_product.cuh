// Products of a tile of rows with a tile of router columns in the order of operations of
// kernels/base/routing.h: lane l of a warp adds the groups of 8 elements l, l + 32, ... in
// ascending order with fused multiply-adds; the 32 partial sums are added as a tree (for w = 16, 8,
// 4, 2, 1, lane l + w is added to lane l). The result of a row does not depend on its tile.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_variant.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

// The kernel's constants for a RouteTile and the type of the rows' elements.
template <typename T_, RouteTile kTile>
struct ProductTile {
  using T = T_;  // float or Bf16
  static constexpr RouteTileShape kShape = ShapeOf(kTile);
  static constexpr int kRowTile = kShape.row_tile, kColumnTile = kShape.column_tile;
  static constexpr int kColumnWarps = kShape.column_warps;
  static constexpr int kStages = kShape.stages;
  static constexpr int kRows = kShape.rows(), kColumns = kShape.columns();
  static constexpr int kWarps = kShape.row_warps * kShape.column_warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kManySums = kRowTile * kColumnTile >= 64;
  static constexpr bool kHasPlanes = true;
  static constexpr int kWeightBytes = kColumns * kRouterStep * 4;
  static constexpr int kRowBytes = kRouterStep * static_cast<int>(sizeof(T));
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kHeaderBytes = static_cast<int>(RouteHeaderBytes(kTile));
  static_assert(kBytes == RouteTileBytes(kTile, static_cast<int>(sizeof(T))));
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
  float* products = nullptr;  // [rows, columns], used if a row has several tiles
};

// Calls f(index) for the thread's share of kCount copies. Tiles with many sums have no registers
// for the addresses of several copies.
template <typename Tile, int kCount, typename F>
__device__ __forceinline__ void ForEachCopy(const F& f) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (Tile::kManySums) {
#pragma unroll 1
    for (int index = thread; index < kCount; index += Tile::kThreads) f(index);
  } else {
    static_assert(kCount % Tile::kThreads == 0);
#pragma unroll
    for (int i = 0; i < kCount / Tile::kThreads; ++i) f(thread + i * Tile::kThreads);
  }
}

template <typename Tile>
__device__ __forceinline__ void CopyWeights(const ProductArgs& a, int first_column, int begin,
                                            char* stage) {
  constexpr int kChunks = kRouterStep * 4 / 16;
  const float* from = a.weights + first_column * a.padded + begin;
  ForEachCopy<Tile, Tile::kColumns * kChunks>([&](int index) {
    const int column = index / kChunks, chunk = index % kChunks;
    CopyAsync16(stage + column * kRouterStep * 4 + chunk * 16,
                from + column * a.padded + chunk * 4);
  });
}

// Copies one step of the rows. Elements beyond a row's last one become zeros; rows out of range are
// not copied, as nothing reads their products. In f32, a lane's group of 8 elements has two 16-byte
// chunks, which are stored in two separate planes, so that the lanes of a warp read adjacent
// chunks.
template <typename Tile>
__device__ __forceinline__ void CopyRows(const ProductArgs& a, int first_row, int begin,
                                         char* stage) {
  using T = typename Tile::T;
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(T));
  constexpr int kChunks = kRouterStep / kPerChunk;
  ForEachCopy<Tile, Tile::kRows * kChunks>([&](int index) {
    const int row = index / kChunks, chunk = index % kChunks;
    if (first_row + row >= a.rows) return;
    const int place = sizeof(T) == 2 ? chunk : chunk % 2 * 32 + chunk / 2;
    char* to = stage + Tile::kWeightBytes + row * Tile::kRowBytes + place * 16;
    const int element = begin + chunk * kPerChunk;
    int left = a.width - element;
    left = left < 0 ? 0 : left < kPerChunk ? left : kPerChunk;
    const T* from = static_cast<const T*>(a.input);
    if (left > 0) from += (first_row + row) * a.stride + element;
    if (a.aligned) {
      CopyAsync16(to, from, left * static_cast<int>(sizeof(T)));
    } else {
      T* values = reinterpret_cast<T*>(to);
#pragma unroll
      for (int j = 0; j < kPerChunk; ++j) values[j] = j < left ? from[j] : T{0};
    }
  });
}

// Adds the products of one step: in each of two halves, lane l adds the products of elements
// 8 l + 4 half to 8 l + 4 half + 3, a group of which is in two words of bf16 or one chunk of f32.
// `weights` and `rows` are the step's elements of the first column and row, `weight_stride` the
// elements from column to column and `row_bytes` the bytes from row to row. In f32, the chunks are
// in two planes (see CopyRows()) if the tile has them.
template <typename Tile>
__device__ __forceinline__ void AddStep(const float* weights, int weight_stride, const char* rows,
                                        int row_bytes, int lane,
                                        float (&sums)[Tile::kRowTile * Tile::kColumnTile]) {
  using T = typename Tile::T;
#pragma unroll(Tile::kManySums ? 1 : 2)
  for (int half = 0; half < 2; ++half) {
    [[maybe_unused]] uint2 packed[Tile::kRowTile];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int m = 0; m < Tile::kRowTile; ++m) {
        packed[m] = *reinterpret_cast<const uint2*>(rows + m * row_bytes + lane * 16 + half * 8);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float2 x[Tile::kRowTile];
#pragma unroll
      for (int m = 0; m < Tile::kRowTile; ++m) {
        if constexpr (sizeof(T) == 2) {
          const uint32_t word = pair == 0 ? packed[m].x : packed[m].y;
          x[m].x = LowBf16(word);
          x[m].y = HighBf16(word);
        } else {
          const int chunk = Tile::kHasPlanes ? half * 32 + lane : lane * 2 + half;
          x[m] = *reinterpret_cast<const float2*>(rows + m * row_bytes + chunk * 16 + pair * 8);
        }
      }
#pragma unroll
      for (int n = 0; n < Tile::kColumnTile; ++n) {
        const float2 w = *reinterpret_cast<const float2*>(weights + n * weight_stride +
                                                          (half * 2 + pair) * 64 + lane * 2);
#pragma unroll
        for (int m = 0; m < Tile::kRowTile; ++m) {
          float& sum = sums[m * Tile::kColumnTile + n];
          sum = fmaf(x[m].x, w.x, sum);
          sum = fmaf(x[m].y, w.y, sum);
        }
      }
    }
  }
}

// Computes the tile's products. Stores them in `shared` [Tile::kRows][Tile::kColumns] if it is not
// null, otherwise in global memory. `prefetch` is called once, before the kernel waits for earlier
// kernels, and may start asynchronous copies that end before the products do. After a barrier,
// `memory` can be used for other data.
template <typename Tile, typename Prefetch>
__device__ __forceinline__ void TileProducts(const ProductArgs& a, int first_row, int first_column,
                                             char* memory, float* shared,
                                             const Prefetch& prefetch) {
  constexpr int kSums = Tile::kRowTile * Tile::kColumnTile;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int row_warp = warp / Tile::kColumnWarps, column_warp = warp % Tile::kColumnWarps;
  const int steps = static_cast<int>(a.padded / kRouterStep);
  // Copies of weights start before GridDependencyPass(), because weights do not depend on earlier
  // kernels.
  const int early = min(steps, Tile::kStages - 1);
#pragma unroll 1
  for (int s = 0; s < early; ++s) {
    CopyWeights<Tile>(a, first_column, s * kRouterStep, memory + s * Tile::kStageBytes);
  }
  prefetch();
  GridDependencyPass();
#pragma unroll 1
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    if (s < steps) CopyRows<Tile>(a, first_row, s * kRouterStep, memory + s * Tile::kStageBytes);
    CopyAsyncCommit();
  }
  // Warps without rows or columns only copy.
  const bool computes = first_row + row_warp * Tile::kRowTile < a.rows &&
                        first_column + column_warp * Tile::kColumnTile < a.columns;
  float sums[kSums] = {};
  int use = 0, fill = Tile::kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    CopyAsyncWait<Tile::kStages - 2>();
    __syncthreads();
    const int next = step + Tile::kStages - 1;
    if (next < steps) {
      char* stage = memory + fill * Tile::kStageBytes;
      CopyWeights<Tile>(a, first_column, next * kRouterStep, stage);
      CopyRows<Tile>(a, first_row, next * kRouterStep, stage);
    }
    CopyAsyncCommit();
    if (computes) {
      const char* stage = memory + use * Tile::kStageBytes;
      AddStep<Tile>(
          reinterpret_cast<const float*>(stage) + column_warp * Tile::kColumnTile * kRouterStep,
          kRouterStep, stage + Tile::kWeightBytes + row_warp * Tile::kRowTile * Tile::kRowBytes,
          Tile::kRowBytes, lane, sums);
    }
    use = use + 1 < Tile::kStages ? use + 1 : 0;
    fill = fill + 1 < Tile::kStages ? fill + 1 : 0;
  }
  if (!computes) return;
  SpreadTreeSums<kSums>(sums, lane);
  constexpr int kShare = kSums < 32 ? 32 / kSums : 1;
  if (lane % kShare != 0) return;
#pragma unroll
  for (int i = 0; i < (kSums + 31) / 32; ++i) {
    const int index = TreeSumIndex<kSums>(lane) + i;
    const int row = row_warp * Tile::kRowTile + index / Tile::kColumnTile;
    const int column = column_warp * Tile::kColumnTile + index % Tile::kColumnTile;
    if (first_row + row >= a.rows || first_column + column >= a.columns) continue;
    float v = sums[i];
    if (a.bias != nullptr) v = v + a.bias[first_column + column];
    if (shared != nullptr) {
      shared[row * Tile::kColumns + column] = v;
    } else {
      a.products[int64_t{first_row + row} * a.columns + first_column + column] = v;
    }
  }
}

}  // namespace moeserve::cuda

// Parts that the kernels for tiles of neighbouring tokens share: the results of a row's splits are
// merged in registers or, for wide heads, in shared memory.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {

// The results of all threads, merged so far, in shared memory. Used for heads that are too wide for
// registers. Values with the same index are adjacent for all threads.
template <int kDim, int kThreads>
struct StashedRows {
  float4 sums[kDim / 8][kThreads];
  float maximum[2][kThreads];
  float sum[2][kThreads];
};

struct NoStash {};

template <int kDim>
constexpr bool kStash = kDim > 128;

template <int kDim, int kThreads>
using Stash = std::conditional_t<kStash<kDim>, StashedRows<kDim, kThreads>, NoStash>;

// As MergeState() for the state of a thread's rows in `merged` or `stash`. `first`: no split has
// been merged before.
template <typename MergedType, typename StashType>
__device__ __forceinline__ void MergeTiledState(bool first, float factor,
                                                RowState<kTileSteps>* state, MergedType* merged,
                                                StashType* stash, MergeFactors (&f)[2]) {
  float sum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = SumOfChains(state->sum[0][h], state->sum[1][h], state->sum[2][h], state->sum[3][h]);
  }
  if constexpr (std::is_same_v<StashType, NoStash>) {
    MergeState(sum, factor, state, merged->maximum, merged->sum, f);
  } else {
    const int thread = threadIdx.x;
    float maximum[2], merged_sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = first ? kMinusInfinity : stash->maximum[h][thread];
      merged_sum[h] = first ? 0.0f : stash->sum[h][thread];
    }
    MergeState(sum, factor, state, maximum, merged_sum, f);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      stash->maximum[h][thread] = maximum[h];
      stash->sum[h][thread] = merged_sum[h];
    }
  }
}

// As MergeValues(), with results in `merged` or `stash`.
template <int kCount, typename MergedType, typename StashType>
__device__ __forceinline__ void MergeTiledValues(bool first, const MergeFactors (&f)[2],
                                                 float (&sums)[kCount][4], MergedType* merged,
                                                 StashType* stash) {
  if constexpr (std::is_same_v<StashType, NoStash>) {
    MergeValues(f, sums, merged->sums);
  } else {
    const int thread = threadIdx.x;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float4 m = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : stash->sums[n][thread];
      m.x = fmaf(sums[n][0], f[0].split, m.x * f[0].merged);
      m.y = fmaf(sums[n][1], f[0].split, m.y * f[0].merged);
      m.z = fmaf(sums[n][2], f[1].split, m.z * f[1].merged);
      m.w = fmaf(sums[n][3], f[1].split, m.w * f[1].merged);
      stash->sums[n][thread] = m;
      sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    }
  }
}

// A thread's results merged so far for its two rows, if they are in registers; empty if they are in
// StashedRows.
template <int kDim>
using Merged = std::conditional_t<kStash<kDim>, NoStash, MergedRows<kDim>>;

// The range of keys that at least one of the warp's 16 rows sees.
struct KeysOfWarp {
  int first = INT32_MAX, last = -1;
};

template <int kRows>
__device__ __forceinline__ KeysOfWarp FindKeysOfWarp(const BlockRows<kRows>& rows, int warp_row,
                                                     const SeenKeys& seen) {
  KeysOfWarp keys;
  if (const int p = rows.position[warp_row + ComputedHere(static_cast<int>(threadIdx.x)) % 16];
      p >= 0) {
    keys.first = FirstKey(seen, p);
    keys.last = LastKey(seen, p, rows.length);
  }
#pragma unroll
  for (int other = 1; other < 16; other *= 2) {
    keys.first = min(keys.first, __shfl_xor_sync(kFullMask, keys.first, other));
    keys.last = max(keys.last, __shfl_xor_sync(kFullMask, keys.last, other));
  }
  return keys;
}

// Stores the finished rows of the warp whose 16 rows begin at `warp_row`.
template <int kDim, int kRows, typename StashType>
__device__ __forceinline__ void StoreFinished(const AttentionLaunch& a, BlockRows<kRows>& rows,
                                              int warp_row, const Merged<kDim>& merged,
                                              const StashType& stash) {
  const int lane = threadIdx.x % 32;
  const int dim = a.cache.value_dim();
  float zeros = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + lane / 4 + h * 8;
    if (rows.query_row[row] < 0) continue;
    float maximum, sum;
    if constexpr (kStash<kDim>) {
      maximum = stash.maximum[h][threadIdx.x];
      sum = stash.sum[h][threadIdx.x];
    } else {
      maximum = merged.maximum[h];
      sum = merged.sum[h];
    }
    const float inverse = InverseOfSum(a, rows.head[row], maximum, sum);
    Bf16* to =
        static_cast<Bf16*>(a.output) + rows.query_row[row] * a.output_stride + rows.head[row] * dim;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float x, y;
      if constexpr (kStash<kDim>) {
        const float4 m = stash.sums[n][threadIdx.x];
        x = h == 0 ? m.x : m.z;
        y = h == 0 ? m.y : m.w;
      } else {
        x = merged.sums[n][h * 2];
        y = merged.sums[n][h * 2 + 1];
      }
      StoreBf16Pair(to, n * 8 + lane % 4 * 2, dim, x * inverse, y * inverse);
      zeros = fmaf(x * inverse, 0.0f, fmaf(y * inverse, 0.0f, zeros));
    }
  }
  NoteResults(zeros, rows);
}

// Launches a kernel whose blocks compute tiles of `rows` rows.
inline void LaunchTiles(void (*kernel)(AttentionLaunch, int, int, float), int rows, int threads,
                        size_t shared_bytes, const AttentionLaunch& args, cudaStream_t stream) {
  const TiledShape shape = TiledShapeOf(args, rows);
  Launch(kernel,
         {.grid = dim3(shape.tiles, args.cache.num_kv_heads, shape.chunks),
          .block = dim3(threads),
          .shared_bytes = shared_bytes,
          .stream = stream,
          .overlaps_predecessor = true},
         args, shape.tokens_per_tile, SplitTokensOf(args) / kTileKeys, args.scale * kLog2E);
}

}  // namespace moeserve::cuda

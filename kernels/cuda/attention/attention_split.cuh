// The computation of single tokens over splits of their context, which the kernels of
// attention_split_mma.cu and attention_cluster_mma.cu share. A thread block computes the query
// heads of one token that share a kv head, padded to 16 rows, so keys and values are read once for
// all of these heads. The four warps divide a tile's keys among them in the first product, and the
// head's columns in the second.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/attention/int8/int8_tiles.cuh"

namespace moeserve::cuda {

inline constexpr int kSplitThreads = 128;
inline constexpr int kSplitRows = 16;

template <bool kInt8>
struct SplitScales {};
template <>
struct SplitScales<true> {
  TileScales scales[2];
};

// Two tiles of keys are in flight at any time. With two buffers for values, two tiles of values
// are; with one buffer only one. With kInt8, the cache is one of int8. The scales of a tile are
// copied with its keys.
template <int kDim, int kValueBuffers, bool kInt8>
struct SharedSplit : SplitScales<kInt8> {
  static constexpr int kTileBytes = kInt8 ? kInt8TileBytes<kDim> : kTileKeys * kDim * 2;
  alignas(128) char keys[2][kTileBytes];
  char values[kValueBuffers][kTileBytes];
  char queries[kSplitRows * kDim * 2];
  char weights[kSplitRows * kTileKeys * 2];
  float maximum[kSplitThreads / 32][kSplitRows];
  // Chains of the sums of weights, one per lane of a row.
  float sum[kSplitThreads / 32][kSplitRows][4];
  BlockRows<kSplitRows> rows;
};

// The number of columns of the head that one warp computes in the second product.
template <int kDim>
constexpr int kSplitColumns = kDim / 4;

// The fragments that a thread has of these columns.
template <int kDim>
using SplitSums = float[kSplitColumns<kDim> / 8][4];

// The tiles that a block computes: those of one split, of all splits, or of each of a cluster's
// turns in the splits.
struct SplitTiles {
  int begin, end;
  int split_tiles;  // per split, a power of two
  int skipped = 0;  // tiles of other blocks between two splits of this block

  // Returns the tile that follows `tile`; it is not below `end` if there is none.
  __device__ __forceinline__ int Next(int tile) const {
    ++tile;
    return (tile & (split_tiles - 1)) == 0 ? tile + skipped : tile;
  }
  __device__ __forceinline__ bool EndsSplit(int tile) const {
    return ((tile + 1) & (split_tiles - 1)) == 0 || tile + 1 == end;
  }
};

// Raises `maximum`, which holds the largest score of each row over the warp's keys, to the largest
// score over the keys of all warps.
template <typename Shared>
__device__ __forceinline__ void ShareMaximum(Shared& shared, int warp, int lane,
                                             float (&maximum)[2]) {
  if (lane % 4 == 0) {
    shared.maximum[warp][lane / 4] = maximum[0];
    shared.maximum[warp][lane / 4 + 8] = maximum[1];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < kSplitThreads / 32; ++w) {
      maximum[h] = fmaxf(maximum[h], shared.maximum[w][lane / 4 + h * 8]);
    }
  }
}

// Adds the softmax weights of the warp's keys to their sums, and stores them in shared memory.
// `scale` multiplies them in between.
template <typename Shared, typename ScaleFunction>
__device__ __forceinline__ void StoreWeights(Shared& shared, int warp, int lane, float factor,
                                             const ScaleFunction& scale, float (&scores)[2][4],
                                             RowState<1>* state) {
  const float reference[2] = {Reference(state->maximum[0] * factor),
                              Reference(state->maximum[1] * factor)};
  uint32_t weights[4];
  Weigh(scores, 0, factor, reference, state->sum[0]);
  scale(scores);
  PackWeights(scores, 0, weights);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(
        PlaneAddress<kSplitRows>(shared.weights, lane / 4 + i % 2 * 8, warp * 2 + i / 2) +
        lane % 4 * 4) = weights[i];
  }
}

// Returns the sums of weights of the thread's rows over the keys of all warps. Contains a barrier.
template <typename Shared>
__device__ __forceinline__ void ShareSums(Shared& shared, const RowState<1>& state,
                                          float (&sum)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) shared.sum[warp][lane / 4 + h * 8][lane % 4] = state.sum[0][h];
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8, q = lane % 4;
    sum[h] = SumOfChains(shared.sum[0][row][q], shared.sum[1][row][q], shared.sum[2][row][q],
                         shared.sum[3][row][q]);
  }
}

// Computes `tiles` of the keys in `range`. `load_queries` is called after the first copies have
// started; it must leave the block's rows and queries in `shared`, the rows before a barrier. At
// the end of each split, at_split_end(factor, state, sums) is called, where state->maximum times
// `factor` are the largest scores of the thread's two rows, ShareSums() returns their sums of
// weights, and `sums` are its fragments of the weighted values. It must reset the state and the
// fragments if another split follows.
template <int kDim, int kValueBuffers, bool kInt8, typename LoadFunction, typename EndFunction>
__device__ __forceinline__ void ComputeSplits(const AttentionLaunch& a, float scale, int kv_head,
                                              const BlockKeys& range, const SplitTiles& tiles,
                                              SharedSplit<kDim, kValueBuffers, kInt8>& shared,
                                              const LoadFunction& load_queries,
                                              const EndFunction& at_split_end) {
  // The values of the tile kAhead steps from now are copied while a tile is computed.
  constexpr int kAhead = kValueBuffers - 1;
  using Copies = std::conditional_t<kInt8, Int8TileCopies<kDim, kSplitThreads>,
                                    TileCopies<kDim, kSplitThreads, (kDim > 128)>>;
  const Copies copies(a.cache, kv_head, range);
  // The blocks of the tile whose values, and of the one whose keys are copied next.
  typename Copies::Blocks of_values, of_keys;
  // Splits have an even number of tiles, so neighbours in the order of the tiles have different
  // buffers.
  const auto copy_keys = [&](int tile, const typename Copies::Blocks& blocks) {
    if (tile < tiles.end) {
      copies.StartKeys(shared.keys[tile % 2], tile, blocks);
      if constexpr (kInt8) copies.StartScales(&shared.scales[tile % 2], tile, blocks);
    }
    CopyAsyncCommit();
  };
  const auto copy_values = [&](int tile, const typename Copies::Blocks& blocks) {
    if (tile < tiles.end) copies.StartValues(shared.values[tile % kValueBuffers], tile, blocks);
    CopyAsyncCommit();
  };
  int tile = tiles.begin, next = tiles.Next(tile), second = tiles.Next(next);
  copies.Find(tile, of_values);
  copies.Find(next, of_keys);
  copy_keys(tile, of_values);
  if constexpr (kAhead == 1) copy_values(tile, of_values);
  copy_keys(next, of_keys);
  if constexpr (kAhead == 0) copies.Find(second, of_keys);
  load_queries();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SeenByAll seen = SeenByAllOf(shared.rows, 0, a.seen);
  const float factor = FactorOf(a, scale).factor;
  RowState<1> state;
  SplitSums<kDim> sums = {};
  for (; tile < tiles.end; tile = next, next = second, second = tiles.Next(second)) {
    // Groups committed so far, oldest first: ..., keys(tile), values(tile) if kAhead is 1,
    // keys(next).
    CopyAsyncWait<1 + kAhead>();
    __syncthreads();
    if constexpr (kAhead == 1) {
      copy_values(next, of_keys);
      copies.Find(second, of_keys);
    } else {
      copy_values(tile, of_values);
    }
    float scores[2][4];
    if constexpr (kInt8) {
      Int8Scores<kDim, kSplitRows>(shared.queries, 0, shared.keys[tile % 2], warp * 16, scores);
      ScaleKeys(shared.scales[tile % 2].keys, warp * 16, scores);
    } else {
      Scores<kDim, kSplitRows>(shared.queries, 0, shared.keys[tile % 2], warp * 16, scores);
    }
    float maximum[2] = {state.maximum[0], state.maximum[1]};
    MaskAndMaximum(a, scale, shared.rows, 0, seen, tile * kTileKeys + warp * 16, scores, maximum);
    ShareMaximum(shared, warp, lane, maximum);
    const Rescaling rescaling = RaiseMaximum(maximum, factor, &state);
    const auto scale_values = [&](float(&weights)[2][4]) {
      if constexpr (kInt8) ScaleKeys(shared.scales[tile % 2].values, warp * 16, weights);
    };
    StoreWeights(shared, warp, lane, factor, scale_values, scores, &state);
    CopyAsyncWait<2 * kAhead>();
    __syncthreads();
    copy_keys(second, of_keys);
    if constexpr (kAhead == 0) {
      copies.Find(next, of_values);
      copies.Find(tiles.Next(second), of_keys);
    }
    Rescale(rescaling, sums);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint32_t weights[4];
      LoadMatrix4(weights,
                  PlaneAddress<kSplitRows>(shared.weights, lane % 16, step * 2 + lane / 16));
      constexpr int kColumns = kSplitColumns<kDim>;
      char* const values = shared.values[tile % kValueBuffers];
      if constexpr (kInt8) {
        AddInt8Values<kColumns>(weights, values, step, warp * kColumns, sums);
      } else {
        AddValues<kColumns>(weights, values, step, warp * kColumns, sums);
      }
    }
    if (tiles.EndsSplit(tile)) at_split_end(factor, &state, sums);
  }
}

}  // namespace moeserve::cuda

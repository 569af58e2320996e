// Parts that the kernels for latent vectors share, so that a row has the same bits from each of
// them.
//
// Order of sums: tiles have 32 positions. The score of a key is ((p0 + p1) + (p2 + p3)), where pw
// has the products of columns [16 w, 16 w + 16) of every plane of 64 columns, added plane by plane.
// Weights are added in two chains of 16 keys, in other respects as attention_mma.cuh describes.
#pragma once

#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_mma.cuh"

namespace moeserve::cuda {

inline constexpr int kLatentKeys = 32;  // positions of a tile
inline constexpr int kLatentSteps = kLatentKeys / 16;
inline constexpr int kLatentPlaneBytes = kLatentKeys * kPlaneRowBytes;

// Widths that the kernels are compiled for, in planes: of keys and of values.
template <int kKeyPlanes, int kValuePlanes>
struct LatentWidth {
  static constexpr int kKeys = kKeyPlanes;
  static constexpr int kValues = kValuePlanes;
  static constexpr int kPairs = 2 * kValuePlanes;  // groups of 8 value columns of a warp
};

// Returns the number of splits that a range of keys overlaps.
__device__ __forceinline__ int SplitsOf(const BlockKeys& keys, int split_tokens) {
  return keys.last / split_tokens - keys.first / split_tokens + 1;
}

// Starts the copies of tiles of latent vectors to shared memory, for all threads of a block
// together. In shared memory, key k's 16-byte chunk c is at PlaneAddress<kLatentKeys>(to, k, c).
// Each thread copies the same chunk of all planes of one row, or of one row of each page.
template <typename Width, int kThreads>
class LatentCopies {
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kPasses = kLatentKeys / kRowsAtOnce;
  static_assert(kPasses >= 1 && kRowsAtOnce % kPageTokens == 0);

 public:
  using Blocks = int32_t[kPasses];  // the pages of a tile that this thread copies from

  // The arguments must outlive the object.
  __device__ __forceinline__ LatentCopies(const KvLayerView& cache, const BlockKeys& keys)
      : cache_(cache), keys_(keys) {
    from_ = static_cast<const char*>(cache.keys);
    if (HasChunk(0)) from_ += cache.ElementOf(Row() % kPageTokens, Chunk() * 8) * 2;
  }

  // Finds the pages of a tile. Pages that the rows do not read are 0.
  __device__ __forceinline__ void Find(int tile, Blocks& blocks) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int page = tile * (kLatentKeys / kPageTokens) + i + Row() / kPageTokens;
      const int key = page * kPageTokens;
      const bool read = key + kPageTokens > keys_.first && key <= keys_.last;
      blocks[i] = read ? keys_.page_table[page] : 0;
    }
  }

  // `blocks` must be of Find() for the same tile, which must be below the end of the range. Keys
  // that the rows do not read, and columns that the cache does not have, become zeros.
  __device__ __forceinline__ void Start(char* to, int tile, const Blocks& blocks) const {
    const int key = tile * kLatentKeys;
    const bool all = key >= keys_.first && key + kLatentKeys - 1 <= keys_.last;
    if (all && cache_.in_planes() && cache_.padded_dim == Width::kKeys * kPlaneColumns) {
      StartTile<false>(to, tile, blocks, kPlaneBlockBytes);
    } else {
      StartTile<true>(to, tile, blocks, cache_.in_planes() ? kPlaneBlockBytes : kPlaneRowBytes);
    }
  }

 private:
  // The thread's row in a tile, and its chunk in each plane.
  static __device__ __forceinline__ int Row() { return static_cast<int>(threadIdx.x) / 8; }
  static __device__ __forceinline__ int Chunk() {
    return (static_cast<int>(threadIdx.x) % 8) ^ (Row() % 8);
  }
  __device__ __forceinline__ bool HasChunk(int plane) const {
    return plane * 8 + Chunk() < cache_.padded_dim / 8;
  }

  template <bool kPartial>
  __device__ __forceinline__ void StartTile(char* to, int tile, const Blocks& blocks,
                                            int plane_bytes) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * kRowsAtOnce + Row();
      const int key = tile * kLatentKeys + row;
      const bool read = key >= keys_.first && key <= keys_.last;
      const char* from = from_ + static_cast<uint64_t>(static_cast<uint32_t>(blocks[i])) *
                                     static_cast<uint32_t>(cache_.block_stride * 2);
      char* const place =
          to + i * kRowsAtOnce * kPlaneRowBytes + static_cast<int>(threadIdx.x) * 16;
// Tiles that are read in part are few.
#pragma unroll(kPartial ? 1 : Width::kKeys)
      for (int p = 0; p < Width::kKeys; ++p) {
        const bool copied = !kPartial || (read && HasChunk(p));
        CopyAsync16(place + p * kLatentPlaneBytes, copied ? from + p * plane_bytes : from_,
                    copied ? 16 : 0);
      }
    }
  }

  const KvLayerView& cache_;
  const BlockKeys& keys_;
  const char* from_;  // the thread's chunk of the first plane of block 0
};

// As MaskAndMaximum(), for layers without biases.
template <int kRows>
__device__ __forceinline__ void MaskLatentScores(const AttentionLaunch& a, float scale,
                                                 const BlockRows<kRows>& rows, int row,
                                                 const SeenByAll& seen, int key,
                                                 float (&scores)[kLatentKeys / 8][4],
                                                 float (&maximum)[2]) {
  const auto product = [](float dot, int, int) { return dot; };
  if (OwnScores(a, scale)) {
    const auto score = [&](float dot, int, int) {
      return a.soft_cap > 0.0f ? SoftCap(dot * a.scale, a.soft_cap) * kLog2E : dot * scale;
    };
    ReplaceByScores<true>(RowPairOf(rows, row, a.seen), key, score, scores, maximum);
  } else if (__any_sync(kFullMask, !seen.Contains(key, kLatentKeys))) {
    ReplaceByScores<true>(RowPairOf(rows, row, a.seen), key, product, scores, maximum);
  } else {
    ReplaceByScores<false>({}, key, product, scores, maximum);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(kFullMask, maximum[h], 1));
    maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(kFullMask, maximum[h], 2));
  }
}

// Returns the sums of weights of the thread's rows.
__device__ __forceinline__ void SumOfWeights(const RowState<kLatentSteps>& state, float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = SumOfChains(state.sum[0][h], state.sum[1][h], 0.0f, 0.0f);
}

// Stores the results of one split for the two rows of a thread, `row` + lane / 4 and 8 rows
// further: sums[n] are those of the columns column_of(n) and its right neighbour. Threads with
// `first` store the maxima and sums of weights.
template <int kCount, int kRows, typename ColumnOf>
__device__ __forceinline__ void StoreLatentPartial(const AttentionLaunch& a,
                                                   const BlockRows<kRows>& rows, int chunk, int row,
                                                   bool first, const ColumnOf& column_of,
                                                   float* partial, const float (&maximum)[2],
                                                   const float (&sum)[2],
                                                   const float (&sums)[kCount][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, padded = a.cache.padded_value_dim();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int own = row + lane / 4 + h * 8;
    if (rows.query_row[own] < 0) continue;
    float* const to =
        partial + PartialRow(a, chunk, kRows, own, rows.head[own]) * PartialStride(padded);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int column = column_of(n);
      if (column < padded) {
        *reinterpret_cast<float2*>(to + column) = make_float2(sums[n][h * 2], sums[n][h * 2 + 1]);
      }
    }
    if (first && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + padded) = make_float2(maximum[h], sum[h]);
    }
  }
}

// Stores the finished rows of a thread, as above. `maximum` and `sum` are those of the merged
// splits.
template <int kCount, int kRows, typename ColumnOf>
__device__ __forceinline__ void StoreLatentFinished(
    const AttentionLaunch& a, BlockRows<kRows>& rows, int row, const ColumnOf& column_of,
    const float (&maximum)[2], const float (&sum)[2], const float (&merged)[kCount][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, dim = a.cache.value_dim();
  float zeros = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int own = row + lane / 4 + h * 8;
    if (rows.query_row[own] < 0) continue;
    const float inverse = InverseOfSum(a, rows.head[own], maximum[h], sum[h]);
    Bf16* const to = static_cast<Bf16*>(a.output) + rows.query_row[own] * a.output_stride +
                     int64_t{rows.head[own]} * dim;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float x = merged[n][h * 2] * inverse, y = merged[n][h * 2 + 1] * inverse;
      StoreBf16Pair(to, column_of(n), dim, x, y);
      zeros = fmaf(x, 0.0f, fmaf(y, 0.0f, zeros));
    }
  }
  NoteResults(zeros, rows);
}

// Calls f with the narrowest LatentWidth for the layer as a template argument. Returns whether
// there is one.
template <typename F>
bool WithLatentWidth(const KvLayerView& cache, const F& f) {
  const int keys = (cache.head_dim + kPlaneColumns - 1) / kPlaneColumns;
  const int values = (cache.latent_dim + kPlaneColumns - 1) / kPlaneColumns;
  if (keys <= 1) {
    f.template operator()<LatentWidth<1, 1>>();
  } else if (keys <= 5 && values <= 4) {
    f.template operator()<LatentWidth<5, 4>>();
  } else if (keys <= 9 && values <= 8) {
    f.template operator()<LatentWidth<9, 8>>();
  } else {
    return false;
  }
  return true;
}

}  // namespace moeserve::cuda

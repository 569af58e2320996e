// Attention in f32 arithmetic, over a cache of any type. A thread block computes 16 rows over one
// split or all splits of their context; a row is a pair of a token and one of the query heads that
// share a kv head. In the first product (queries times keys), a lane computes one key of the tile
// and a warp four rows. In the second product (weights times values), a thread computes columns of
// the head.
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsOfWarp = kRows / kWarps;
constexpr int kTileKeys = 32;

template <typename Element>
constexpr bool kInt8 = sizeof(Element) == 1;

// The bytes of a key or value in shared memory. CopyTile() exchanges chunks within 128 bytes.
template <int kDim, typename Element>
constexpr int kRowBytes = kDim * sizeof(Element) < 128 ? 128 : kDim * sizeof(Element);

template <int kDim, typename Element>
struct SharedF32 {
  alignas(128) char keys[2][kTileKeys * kRowBytes<kDim, Element>];
  char values[2][kTileKeys * kRowBytes<kDim, Element>];
  float queries[kRows][kDim];
  float weights[kRows][kTileKeys];
  float rescale[kRows];       // factor for the sums so far, at this tile
  MergeFactors merge[kRows];  // used at the end of a split
  float inverse[kRows];       // InverseOfSum()
  BlockRows<kRows> rows;
};

// Number of elements in one 16-byte chunk.
template <typename Element>
constexpr int kChunkElements = 16 / sizeof(Element);

__device__ inline void Widen(const char* chunk, float (&to)[4]) {
  const float4 f = *reinterpret_cast<const float4*>(chunk);
  to[0] = f.x, to[1] = f.y, to[2] = f.z, to[3] = f.w;
}

__device__ inline void Widen(const char* chunk, float (&to)[8]) {
  const uint4 u = *reinterpret_cast<const uint4*>(chunk);
  const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ inline void Widen(const char* chunk, float (&to)[16]) {
  const uint4 u = *reinterpret_cast<const uint4*>(chunk);
  const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int place = KvLayerView::PlaceInSixteen(i);
    to[i] = static_cast<float>(static_cast<int8_t>(words[place / 4] >> place % 4 * 8));
  }
}

__device__ inline float ElementAt(const int8_t* p) { return *p; }
__device__ inline float ElementAt(const float* p) { return *p; }
__device__ inline float ElementAt(const Bf16* p) {
  return __uint_as_float(static_cast<uint32_t>(*p) << 16);
}

// Returns the place of a column in its chunk.
template <typename Element>
__device__ inline int PlaceInChunk(int column) {
  const int place = column % kChunkElements<Element>;
  return kInt8<Element> ? KvLayerView::PlaceInSixteen(place) : place;
}

// The scales of the lane's key and value in an int8 cache.
struct Scales {
  float key, value;
};

// Reads them for key `key`; keys that the rows do not read have none.
__device__ inline Scales ScalesOf(const KvLayerView& cache, int kv_head, const BlockKeys& keys,
                                  int key) {
  if (key < keys.first || key > keys.last) return {0.0f, 0.0f};
  const int32_t block = keys.page_table[key / kPageTokens];
  const int row = key % kPageTokens;
  return {cache.ScalesOf(cache.keys, block, kv_head)[row],
          cache.ScalesOf(cache.values, block, kv_head)[row]};
}

// The columns and rows that one thread computes in the second product.
template <int kDim>
struct OwnSums {
  static constexpr int kColumns = kDim > kThreads ? kDim / kThreads : 1;
  static constexpr int kRowGroups = kDim < kThreads ? kThreads / kDim : 1;
  static constexpr int kOwnRows = kRows / kRowGroups;
  using Sums = float[kOwnRows][kColumns];

  static __device__ __forceinline__ int Column() { return threadIdx.x % (kThreads / kRowGroups); }
  static __device__ __forceinline__ int FirstRow() {
    return threadIdx.x / (kThreads / kRowGroups) * kOwnRows;
  }
};

// Online softmax state of a warp's rows, equal in all lanes: for the current split, and for all
// merged splits.
struct RowMaxima {
  float maximum[kRowsOfWarp], sum[kRowsOfWarp];
  float merged_maximum[kRowsOfWarp], merged_sum[kRowsOfWarp];
};

template <int kDim, typename Element>
__device__ __forceinline__ void LoadQueriesF32(const AttentionLaunch& a,
                                               SharedF32<kDim, Element>& shared) {
  const int dim = a.cache.head_dim;
  for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) {
    const int r = i / kDim, d = i % kDim;
    shared.queries[r][d] =
        shared.rows.query_row[r] >= 0 && d < dim
            ? a.query[shared.rows.query_row[r] * a.query_stride + shared.rows.head[r] * dim + d]
            : 0.0f;
  }
}

// Computes the dot products of the warp's rows with the lane's key. Each has four partial sums
// (elements 0, 4, 8, ...; 1, 5, 9, ...; and so on), which shortens the chains of additions and
// reduces rounding errors.
template <int kDim, typename Element>
__device__ __forceinline__ void KeyDots(const SharedF32<kDim, Element>& shared, const char* key_row,
                                        int warp, int lane, float4 (&dots)[kRowsOfWarp]) {
  constexpr int kElements = kChunkElements<Element>;
#pragma unroll(sizeof(Element) == 1 && kDim > 64 ? 2 : 4)
  for (int c = 0; c < kDim / kElements; ++c) {
    float k[kElements];
    Widen(key_row + ((c ^ (lane & 7)) << 4), k);
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const float* q = &shared.queries[warp * kRowsOfWarp + i][c * kElements];
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const float4 f = *reinterpret_cast<const float4*>(q + e);
        dots[i].x = fmaf(f.x, k[e], dots[i].x);
        dots[i].y = fmaf(f.y, k[e + 1], dots[i].y);
        dots[i].z = fmaf(f.z, k[e + 2], dots[i].z);
        dots[i].w = fmaf(f.w, k[e + 3], dots[i].w);
      }
    }
  }
}

// Computes each row's weight for the lane's key, and the factor by which the row's sums so far must
// be rescaled.
template <int kDim, typename Element>
__device__ __forceinline__ void KeyWeights(const AttentionLaunch& a,
                                           const float4 (&dots)[kRowsOfWarp], int key,
                                           const Scales& scales, float scale, int warp, int lane,
                                           RowMaxima* maxima, SharedF32<kDim, Element>& shared) {
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int row = warp * kRowsOfWarp + i;
    const int position = shared.rows.position[row];
    const bool seen =
        key <= LastKey(a.seen, position, shared.rows.length) && key >= FirstKey(a.seen, position);
    float dot = (dots[i].x + dots[i].y) + (dots[i].z + dots[i].w);
    if constexpr (kInt8<Element>) dot *= scales.key;
    const float s =
        seen ? ScoreOf(a, dot, scale, shared.rows.head[row], position - key) : kMinusInfinity;
    float m = fmaxf(maxima->maximum[i], s);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      m = fmaxf(m, __shfl_xor_sync(kFullMask, m, other));
    }
    const float weight = exp2f(s - Reference(m));
    float total = weight;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      total += __shfl_xor_sync(kFullMask, total, other);
    }
    const float rescale = exp2f(maxima->maximum[i] - Reference(m));
    maxima->sum[i] = maxima->sum[i] * rescale + total;
    maxima->maximum[i] = m;
    shared.weights[row][lane] = kInt8<Element> ? weight * scales.value : weight;
    if (lane == 0) shared.rescale[row] = rescale;
  }
}

// Merges the softmax state of the finished split into the merged state, and stores the factors for
// MergeSums() in shared memory.
template <int kDim, typename Element>
__device__ __forceinline__ void MergeMaxima(const AttentionLaunch& a, int warp, int lane,
                                            RowMaxima* maxima, SharedF32<kDim, Element>& shared) {
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const MergeFactors f = Merge(&maxima->merged_maximum[i], &maxima->merged_sum[i],
                                 maxima->maximum[i], maxima->sum[i]);
    if (lane == 0) {
      shared.merge[warp * kRowsOfWarp + i] = f;
      const int row = warp * kRowsOfWarp + i;
      shared.inverse[row] =
          InverseOfSum(a, shared.rows.head[row], maxima->merged_maximum[i], maxima->merged_sum[i]);
    }
    maxima->maximum[i] = kMinusInfinity;
    maxima->sum[i] = 0.0f;
  }
}

template <int kDim, typename Element>
__device__ __forceinline__ void AddValuesF32(const SharedF32<kDim, Element>& shared,
                                             const char* values,
                                             typename OwnSums<kDim>::Sums& sums) {
  using Own = OwnSums<kDim>;
  constexpr int kElements = kChunkElements<Element>;
  constexpr int kBytes = kRowBytes<kDim, Element>;
  const int column = Own::Column(), own_row = Own::FirstRow();
#pragma unroll
  for (int r = 0; r < Own::kOwnRows; ++r) {
    const float rescale = shared.rescale[own_row + r];
#pragma unroll
    for (int c = 0; c < Own::kColumns; ++c) sums[r][c] *= rescale;
  }
#pragma unroll 2
  for (int k = 0; k < kTileKeys; k += 4) {
    float v[4][Own::kColumns];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < Own::kColumns; ++c) {
        const int d = column + c * kThreads;
        v[j][c] =
            ElementAt(reinterpret_cast<const Element*>(values + (k + j) * kBytes +
                                                       ((d / kElements ^ ((k + j) & 7)) << 4)) +
                      PlaceInChunk<Element>(d));
      }
    }
#pragma unroll
    for (int r = 0; r < Own::kOwnRows; ++r) {
      const float4 w = *reinterpret_cast<const float4*>(&shared.weights[own_row + r][k]);
#pragma unroll
      for (int c = 0; c < Own::kColumns; ++c) {
        sums[r][c] = fmaf(w.x, v[0][c], sums[r][c]);
        sums[r][c] = fmaf(w.y, v[1][c], sums[r][c]);
        sums[r][c] = fmaf(w.z, v[2][c], sums[r][c]);
        sums[r][c] = fmaf(w.w, v[3][c], sums[r][c]);
      }
    }
  }
}

template <int kDim, typename Element>
__device__ __forceinline__ void MergeSums(const SharedF32<kDim, Element>& shared,
                                          typename OwnSums<kDim>::Sums& sums,
                                          typename OwnSums<kDim>::Sums& merged) {
  using Own = OwnSums<kDim>;
#pragma unroll
  for (int r = 0; r < Own::kOwnRows; ++r) {
    const MergeFactors f = shared.merge[Own::FirstRow() + r];
#pragma unroll
    for (int c = 0; c < Own::kColumns; ++c) {
      merged[r][c] = fmaf(sums[r][c], f.split, merged[r][c] * f.merged);
      sums[r][c] = 0.0f;
    }
  }
}

template <int kDim, typename Element>
__device__ __forceinline__ void StorePartial(const AttentionLaunch& a,
                                             const SharedF32<kDim, Element>& shared, int chunk,
                                             float* partial, const RowMaxima& maxima,
                                             const typename OwnSums<kDim>::Sums& sums) {
  using Own = OwnSums<kDim>;
  const int padded = a.cache.padded_dim;
  const int64_t stride = PartialStride(padded);
  const int own_row = Own::FirstRow();
#pragma unroll
  for (int r = 0; r < Own::kOwnRows; ++r) {
    if (shared.rows.query_row[own_row + r] < 0) continue;
    float* to =
        partial + PartialRow(a, chunk, kRows, own_row + r, shared.rows.head[own_row + r]) * stride;
#pragma unroll
    for (int c = 0; c < Own::kColumns; ++c) {
      const int d = Own::Column() + c * kThreads;
      if (d < padded) to[d] = sums[r][c];
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int row = warp * kRowsOfWarp + i;
    if (lane == 0 && shared.rows.query_row[row] >= 0) {
      float* to =
          partial + PartialRow(a, chunk, kRows, row, shared.rows.head[row]) * stride + padded;
      to[0] = maxima.maximum[i];
      to[1] = maxima.sum[i];
    }
  }
}

template <int kDim, typename Element>
__device__ __forceinline__ void StoreFinished(const AttentionLaunch& a,
                                              const SharedF32<kDim, Element>& shared,
                                              const typename OwnSums<kDim>::Sums& merged) {
  using Own = OwnSums<kDim>;
  const int dim = a.cache.value_dim();
#pragma unroll
  for (int r = 0; r < Own::kOwnRows; ++r) {
    const int row = Own::FirstRow() + r;
    if (shared.rows.query_row[row] < 0) continue;
    const int64_t to = shared.rows.query_row[row] * a.output_stride + shared.rows.head[row] * dim;
#pragma unroll
    for (int c = 0; c < Own::kColumns; ++c) {
      const int d = Own::Column() + c * kThreads;
      if (d >= dim) continue;
      const float value = merged[r][c] * shared.inverse[row];
      if (a.output_dtype == DType::kBF16) {
        static_cast<Bf16*>(a.output)[to + d] = static_cast<Bf16>(PackBf16(value, 0.0f));
      } else {
        static_cast<float*>(a.output)[to + d] = value;
      }
    }
  }
}

// Computes rows [chunk * kRows, (chunk + 1) * kRows) of tokens [begin, end), which belong to one
// sequence. split = -1: all splits.
template <int kDim, typename Element>
__device__ inline void RunRows(const AttentionLaunch& a, int begin, int end, int split, int kv_head,
                               int chunk, int split_tokens, float scale,
                               SharedF32<kDim, Element>& shared) {
  constexpr int kBytes = kRowBytes<kDim, Element>;
  BlockKeys range;
  if (!FindWork<kTileKeys>(a, begin, end, split, split_tokens, kv_head, chunk, &shared.rows,
                           &range)) {
    return;
  }
  const auto copy = [&](char(&to)[2][kTileKeys * kBytes], const void* from, int tile) {
    if (tile < range.tiles.end) {
      CopyTile<kTileKeys, kBytes, kThreads, kInt8<Element>>(to[tile % 2], from, a.cache, kv_head,
                                                            range, tile);
    }
    CopyAsyncCommit();
  };
  copy(shared.keys, a.cache.keys, range.tiles.begin);
  copy(shared.values, a.cache.values, range.tiles.begin);
  copy(shared.keys, a.cache.keys, range.tiles.begin + 1);
  LoadQueriesF32(a, shared);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  RowMaxima maxima;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    maxima.maximum[i] = maxima.merged_maximum[i] = kMinusInfinity;
    maxima.sum[i] = maxima.merged_sum[i] = 0.0f;
  }
  typename OwnSums<kDim>::Sums sums = {}, merged = {};
  for (int tile = range.tiles.begin; tile < range.tiles.end; ++tile) {
    Scales scales{};
    if constexpr (kInt8<Element>) {
      scales = ScalesOf(a.cache, kv_head, range, tile * kTileKeys + lane);
    }
    // Groups committed so far, oldest first: ..., keys(tile), values(tile), keys(tile + 1).
    CopyAsyncWait<2>();
    __syncthreads();
    copy(shared.values, a.cache.values, tile + 1);
    float4 dots[kRowsOfWarp] = {};
    KeyDots(shared, shared.keys[tile % 2] + lane * kBytes, warp, lane, dots);
    KeyWeights(a, dots, tile * kTileKeys + lane, scales, scale, warp, lane, &maxima, shared);
    const bool split_ends =
        (tile + 1) * kTileKeys % split_tokens == 0 || tile + 1 == range.tiles.end;
    const bool merges = split < 0 && split_ends;
    if (merges) MergeMaxima(a, warp, lane, &maxima, shared);
    CopyAsyncWait<2>();
    __syncthreads();
    copy(shared.keys, a.cache.keys, tile + 2);
    AddValuesF32(shared, shared.values[tile % 2], sums);
    if (merges) MergeSums(shared, sums, merged);
  }
  if (split >= 0) {
    StorePartial(a, shared, chunk, PartialOf(a, begin, split, split_tokens), maxima, sums);
  } else {
    StoreFinished(a, shared, merged);
  }
}

// With heads of more than 128 elements, only one or two blocks fit into shared memory, so there is
// no gain if the compiler limits registers for more blocks. 0 leaves the number of blocks to the
// compiler.
template <int kDim, typename Element>
__global__ void __launch_bounds__(kThreads, kDim > 128 ? 1 : 0)
    SplitKernel(const AttentionLaunch a, const int split_tokens, const float scale) {
  GridDependencyPass();
  const int item = blockIdx.x;
  if (item >= *a.work.item_count) return;
  const int token = a.work.item_token[item];
  RunRows<kDim, Element>(a, token, token + 1, a.work.item_split[item],
                         blockIdx.y % a.cache.num_kv_heads, blockIdx.y / a.cache.num_kv_heads,
                         split_tokens, scale, *DynamicShared<SharedF32<kDim, Element>>());
}

template <int kDim, typename Element>
__global__ void __launch_bounds__(kThreads)
    TiledKernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tokens,
                const float scale) {
  GridDependencyPass();
  auto& shared = *DynamicShared<SharedF32<kDim, Element>>();
  ForEachRun(a, tokens_per_tile, shared.rows, [&](int begin, int end) {
    RunRows<kDim, Element>(a, begin, end, -1, blockIdx.y, blockIdx.z, split_tokens, scale, shared);
  });
}

float ScaleOf(const AttentionLaunch& args) {
  return static_cast<float>(args.scale * 1.4426950408889634);  // log2(e)
}

template <int kDim, typename Element>
void LaunchSplit(const AttentionLaunch& args, cudaStream_t stream) {
  const int group = GroupOf(args);
  const int chunks = (group + kRows - 1) / kRows;
  Launch(SplitKernel<kDim, Element>,
         {.grid = dim3(MaxItems(args), args.cache.num_kv_heads * chunks),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(SharedF32<kDim, Element>),
          .stream = stream,
          .overlaps_predecessor = true},
         args, SplitTokensOf(args), ScaleOf(args));
}

template <int kDim, typename Element>
void LaunchTiled(const AttentionLaunch& args, cudaStream_t stream) {
  const TiledShape shape = TiledShapeOf(args, kRows);
  Launch(TiledKernel<kDim, Element>,
         {.grid = dim3(shape.tiles, args.cache.num_kv_heads, shape.chunks),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(SharedF32<kDim, Element>),
          .stream = stream,
          .overlaps_predecessor = true},
         args, shape.tokens_per_tile, SplitTokensOf(args), ScaleOf(args));
}

}  // namespace

void LaunchSplitF32(const AttentionLaunch& args, cudaStream_t stream) {
  WithElement(args.cache.type, [&]<typename Element>() {
    WithWidthOfHeads(args.cache.widest_dim(),
                     [&]<int kDim>() { LaunchSplit<kDim, Element>(args, stream); });
  });
}

void LaunchTiledF32(const AttentionLaunch& args, cudaStream_t stream) {
  WithElement(args.cache.type, [&]<typename Element>() {
    WithWidthOfHeads(args.cache.widest_dim(),
                     [&]<int kDim>() { LaunchTiled<kDim, Element>(args, stream); });
  });
}

}  // namespace moeserve::cuda

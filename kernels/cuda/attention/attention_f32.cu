// Attention in f32 arithmetic, over either type of cache. A thread block takes 16 rows, pairs of a
// token and one of the query heads that share a kv head, through one split or all splits of their
// context. In the first product a lane owns a key of the tile and a warp four rows; in the second a
// thread owns columns of the head.
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
constexpr double kLog2E = 1.4426950408889634;

template <int kDim, typename Element>
struct SharedF32 {
  alignas(128) char keys[2][kTileKeys * kDim * sizeof(Element)];
  char values[2][kTileKeys * kDim * sizeof(Element)];
  float queries[kRows][kDim];
  float weights[kRows][kTileKeys];
  float rescale[kRows];       // of the sums so far, at this tile
  MergeFactors merge[kRows];  // at the end of a split
  float inverse[kRows];       // of the final sums of weights
  BlockRows<kRows> rows;
};

// Elements of one 16-byte chunk, widened.
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

__device__ inline float ElementAt(const float* p) { return *p; }
__device__ inline float ElementAt(const Bf16* p) {
  return __uint_as_float(static_cast<uint32_t>(*p) << 16);
}

// One chunk of rows of tokens [begin, end), which belong to one sequence; split -1: all splits.
template <int kDim, typename Element>
__device__ inline void RunRows(const AttentionLaunch& a, int begin, int end, int split, int kv_head,
                               int chunk, int split_tokens, float scale,
                               SharedF32<kDim, Element>& shared) {
  constexpr int kRowBytes = kDim * sizeof(Element);
  constexpr int kElements = kChunkElements<Element>;
  // Columns and rows of one thread in the second product.
  constexpr int kColumns = kDim > kThreads ? kDim / kThreads : 1;
  constexpr int kRowGroups = kDim < kThreads ? kThreads / kDim : 1;
  constexpr int kOwnRows = kRows / kRowGroups;
  if (chunk * kRows >= QueryHeadsOf(a, begin, end)) return;
  FindRows(a, begin, end, kv_head, chunk, &shared.rows);
  const int sequence = a.step.sequence[begin];
  if (sequence < 0) {
    StoreZeros(a, shared.rows);
    return;
  }
  const int32_t* block_table = a.step.block_tables + int64_t{sequence} * a.step.table_stride;
  int first = shared.rows.first_key, last = shared.rows.last_key;
  if (split >= 0) {
    first = max(first, split * split_tokens);
    last = min(last, (split + 1) * split_tokens - 1);
  }
  const TileRange tiles = TilesOf<kTileKeys>(first, last);
  const auto copy = [&](char(&to)[2][kTileKeys * kRowBytes], const void* from, int tile) {
    if (tile < tiles.end) {
      CopyTile<kTileKeys, kRowBytes, kThreads>(to[tile % 2], from, a.cache, kv_head, block_table,
                                               tile, first, last);
    }
    CopyAsyncCommit();
  };
  copy(shared.keys, a.cache.keys, tiles.begin);
  copy(shared.values, a.cache.values, tiles.begin);
  copy(shared.keys, a.cache.keys, tiles.begin + 1);
  const int dim = a.cache.head_dim;
  for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) {
    const int r = i / kDim, d = i % kDim;
    shared.queries[r][d] =
        shared.rows.query_row[r] >= 0 && d < dim
            ? a.query[shared.rows.query_row[r] * a.query_stride + shared.rows.head[r] * dim + d]
            : 0.0f;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = threadIdx.x % (kThreads / kRowGroups);
  const int own_row = threadIdx.x / (kThreads / kRowGroups) * kOwnRows;
  float maximum[kRowsOfWarp], sum[kRowsOfWarp], merged_maximum[kRowsOfWarp],
      merged_sum[kRowsOfWarp];
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    maximum[i] = merged_maximum[i] = kMinusInfinity;
    sum[i] = merged_sum[i] = 0.0f;
  }
  float sums[kOwnRows][kColumns] = {}, merged[kOwnRows][kColumns] = {};

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    // Committed so far: ... keys(tile), values(tile), keys(tile + 1).
    CopyAsyncWait<2>();
    __syncthreads();
    copy(shared.values, a.cache.values, tile + 1);
    // Four sums of every fourth element each: shorter chains, smaller errors.
    float4 dots[kRowsOfWarp] = {};
    const char* key_row = shared.keys[tile % 2] + lane * kRowBytes;
#pragma unroll 4
    for (int c = 0; c < kRowBytes / 16; ++c) {
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
    const int key = tile * kTileKeys + lane;
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int row = warp * kRowsOfWarp + i;
      const int position = shared.rows.position[row];
      const bool seen = key <= position && key >= FirstKey(position, a.window);
      const float s =
          seen ? ((dots[i].x + dots[i].y) + (dots[i].z + dots[i].w)) * scale : kMinusInfinity;
      float m = fmaxf(maximum[i], s);
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
      const float rescale = exp2f(maximum[i] - Reference(m));
      sum[i] = sum[i] * rescale + total;
      maximum[i] = m;
      shared.weights[row][lane] = weight;
      if (lane == 0) shared.rescale[row] = rescale;
    }
    const bool split_ends = (tile + 1) * kTileKeys % split_tokens == 0 || tile + 1 == tiles.end;
    if (split < 0 && split_ends) {
#pragma unroll
      for (int i = 0; i < kRowsOfWarp; ++i) {
        const MergeFactors f = Merge(&merged_maximum[i], &merged_sum[i], maximum[i], sum[i]);
        if (lane == 0) {
          shared.merge[warp * kRowsOfWarp + i] = f;
          shared.inverse[warp * kRowsOfWarp + i] = 1.0f / merged_sum[i];
        }
        maximum[i] = kMinusInfinity;
        sum[i] = 0.0f;
      }
    }
    CopyAsyncWait<2>();
    __syncthreads();
    copy(shared.keys, a.cache.keys, tile + 2);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float rescale = shared.rescale[own_row + r];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[r][c] *= rescale;
    }
#pragma unroll 2
    for (int k = 0; k < kTileKeys; k += 4) {
      float v[4][kColumns];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int d = column + c * kThreads;
          v[j][c] = ElementAt(
              reinterpret_cast<const Element*>(shared.values[tile % 2] + (k + j) * kRowBytes +
                                               ((d / kElements ^ ((k + j) & 7)) << 4)) +
              d % kElements);
        }
      }
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const float4 w = *reinterpret_cast<const float4*>(&shared.weights[own_row + r][k]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          sums[r][c] = fmaf(w.x, v[0][c], sums[r][c]);
          sums[r][c] = fmaf(w.y, v[1][c], sums[r][c]);
          sums[r][c] = fmaf(w.z, v[2][c], sums[r][c]);
          sums[r][c] = fmaf(w.w, v[3][c], sums[r][c]);
        }
      }
    }
    if (split < 0 && split_ends) {
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const MergeFactors f = shared.merge[own_row + r];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          merged[r][c] = fmaf(sums[r][c], f.split, merged[r][c] * f.merged);
          sums[r][c] = 0.0f;
        }
      }
    }
  }

  if (split >= 0) {
    const int padded = a.cache.padded_dim;
    const int64_t stride = PartialStride(padded);
    const int slot = a.work.slot_of_token[begin] + split -
                     FirstKey(a.step.position[begin], a.window) / split_tokens;
    float* partial = a.work.partial + slot * (int64_t{a.rows.max_per_token} * a.heads * stride);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      if (shared.rows.query_row[own_row + r] < 0) continue;
      float* to = partial +
                  PartialRow(a, chunk, kRows, own_row + r, shared.rows.head[own_row + r]) * stride;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int d = column + c * kThreads;
        if (d < padded) to[d] = sums[r][c];
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int row = warp * kRowsOfWarp + i;
      if (lane == 0 && shared.rows.query_row[row] >= 0) {
        float* to =
            partial + PartialRow(a, chunk, kRows, row, shared.rows.head[row]) * stride + padded;
        to[0] = maximum[i];
        to[1] = sum[i];
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const int row = own_row + r;
    if (shared.rows.query_row[row] < 0) continue;
    const int64_t to = shared.rows.query_row[row] * a.output_stride + shared.rows.head[row] * dim;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = column + c * kThreads;
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

template <int kDim, typename Element>
__global__ void __launch_bounds__(kThreads)
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
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  int begin = a.tiled_from + tile * tokens_per_tile;
  const int tile_end = min(begin + tokens_per_tile, a.step.tokens);
  while (begin < tile_end) {
    int end = begin + 1;
    while (end < tile_end && a.step.sequence[end] == a.step.sequence[begin]) ++end;
    RunRows<kDim, Element>(a, begin, end, -1, blockIdx.y, blockIdx.z, split_tokens, scale, shared);
    // The next run's rows take the place of this one's.
    __syncthreads();
    begin = end;
  }
}

float ScaleOf(const AttentionLaunch& args) { return static_cast<float>(args.scale * kLog2E); }

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
  const bool bf16 = args.cache.dtype == DType::kBF16;
  if (args.cache.head_dim <= 64) {
    (bf16 ? LaunchSplit<64, Bf16> : LaunchSplit<64, float>)(args, stream);
  } else if (args.cache.head_dim <= 128) {
    (bf16 ? LaunchSplit<128, Bf16> : LaunchSplit<128, float>)(args, stream);
  } else {
    (bf16 ? LaunchSplit<256, Bf16> : LaunchSplit<256, float>)(args, stream);
  }
}

void LaunchTiledF32(const AttentionLaunch& args, cudaStream_t stream) {
  const bool bf16 = args.cache.dtype == DType::kBF16;
  if (args.cache.head_dim <= 64) {
    (bf16 ? LaunchTiled<64, Bf16> : LaunchTiled<64, float>)(args, stream);
  } else if (args.cache.head_dim <= 128) {
    (bf16 ? LaunchTiled<128, Bf16> : LaunchTiled<128, float>)(args, stream);
  } else {
    (bf16 ? LaunchTiled<256, Bf16> : LaunchTiled<256, float>)(args, stream);
  }
}

}  // namespace moeserve::cuda

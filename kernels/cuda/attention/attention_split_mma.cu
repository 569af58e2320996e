// Attention of single tokens over a bf16 cache. A thread block takes the query heads of one token
// that share a kv head, padded to 16 rows, through one split of the context, so keys and values
// are read once for all of them. The four warps share a tile's keys in the first product and the
// head's columns in the second; two tiles of keys and of values are in flight at any time.
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;

template <int kDim>
struct SharedSplit {
  alignas(128) char keys[2][kTileKeys * kDim * 2];
  char values[2][kTileKeys * kDim * 2];
  char queries[kRows * kDim * 2];
  char weights[kRows * kTileKeys * 2];
  float maximum[kThreads / 32][kRows];
  BlockRows<kRows> rows;
};

template <int kDim>
__global__ void __launch_bounds__(kThreads)
    SplitKernel(const AttentionLaunch a, const int split_tokens, const float scale) {
  GridDependencyPass();
  constexpr int kColumns = kDim / 4;  // of one warp
  const int item = blockIdx.x;
  if (item >= *a.work.item_count) return;
  const int token = a.work.item_token[item];
  const int split = a.work.item_split[item];
  const int kv_head = blockIdx.y % a.cache.num_kv_heads;
  const int chunk = blockIdx.y / a.cache.num_kv_heads;
  if (chunk * kRows >= QueryHeadsOf(a, token, token + 1)) return;

  auto& shared = *DynamicShared<SharedSplit<kDim>>();
  FindRows(a, token, token + 1, kv_head, chunk, &shared.rows);
  const int sequence = a.step.sequence[token];
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
  const auto copy_keys = [&](int tile) {
    if (tile < tiles.end) {
      CopyTile<kTileKeys, kDim * 2, kThreads>(shared.keys[tile % 2], a.cache.keys, a.cache, kv_head,
                                              block_table, tile, first, last);
    }
    CopyAsyncCommit();
  };
  const auto copy_values = [&](int tile) {
    if (tile < tiles.end) {
      CopyTile<kTileKeys, kDim * 2, kThreads>(shared.values[tile % 2], a.cache.values, a.cache,
                                              kv_head, block_table, tile, first, last);
    }
    CopyAsyncCommit();
  };
  copy_keys(tiles.begin);
  copy_values(tiles.begin);
  copy_keys(tiles.begin + 1);
  LoadQueries<kDim, kRows, kThreads>(a, shared.rows, shared.queries);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RowPair pair = RowPairOf(shared.rows, 0, a.window);
  const int split_tiles = split_tokens / kTileKeys;
  RowState state;
  float sums[kColumns / 8][4] = {};
  MergedRows<kColumns> merged;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    // Committed so far: ... keys(tile), values(tile), keys(tile + 1).
    CopyAsyncWait<2>();
    __syncthreads();
    copy_values(tile + 1);
    float scores[2][4];
    Scores<kDim>(shared.queries, 0, shared.keys[tile % 2], warp * 16, scores);
    float maximum[2] = {state.maximum[0], state.maximum[1]};
    MaskAndMaximum(scale, pair, tile * kTileKeys + warp * 16, scores, maximum);
    if (lane % 4 == 0) {
      shared.maximum[warp][lane / 4] = maximum[0];
      shared.maximum[warp][lane / 4 + 8] = maximum[1];
    }
    __syncthreads();
    float reference[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) {
        maximum[h] = fmaxf(maximum[h], shared.maximum[w][lane / 4 + h * 8]);
      }
      reference[h] = Reference(maximum[h]);
    }
    uint32_t weights[4];
    Weights(scores, 0, reference, weights);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t*>(
          Swizzled<kTileKeys * 2>(shared.weights, lane / 4 + i % 2 * 8, warp * 2 + i / 2) +
          lane % 4 * 4) = weights[i];
    }
    CopyAsyncWait<2>();
    __syncthreads();
    copy_keys(tile + 2);
    Rescale<kColumns>(maximum, &state, sums);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      LoadMatrix4(weights,
                  Swizzled<kTileKeys * 2>(shared.weights, lane % 16, step * 2 + lane / 16));
      AddValues<kDim, kColumns>(weights, shared.values[tile % 2], step, warp * kColumns, &state,
                                sums);
    }
    if (split < 0 && ((tile + 1) % split_tiles == 0 || tile + 1 == tiles.end)) {
      MergeSplit<kColumns>(&state, sums, &merged);
    }
  }

  if (split >= 0) {
    const int padded = a.cache.padded_dim;
    const int64_t stride = PartialStride(padded);
    const int slot = a.work.slot_of_token[token] + split -
                     FirstKey(a.step.position[token], a.window) / split_tokens;
    float* partial = a.work.partial + slot * (int64_t{a.rows.max_per_token} * a.heads * stride);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + h * 8;
      if (shared.rows.query_row[row] < 0) continue;
      float* to = partial + PartialRow(a, chunk, kRows, row, shared.rows.head[row]) * stride;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = warp * kColumns + n * 8 + lane % 4 * 2;
        if (column < padded) {
          *reinterpret_cast<float2*>(to + column) = make_float2(sums[n][h * 2], sums[n][h * 2 + 1]);
        }
      }
      if (warp == 0 && lane % 4 == 0) {
        *reinterpret_cast<float2*>(to + padded) = make_float2(state.maximum[h], state.sum[h * 2]);
      }
    }
    return;
  }
  const int dim = a.cache.head_dim;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    if (shared.rows.query_row[row] < 0) continue;
    const float inverse = 1.0f / merged.sum[h];
    Bf16* to = static_cast<Bf16*>(a.output) + shared.rows.query_row[row] * a.output_stride +
               shared.rows.head[row] * dim;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const int column = warp * kColumns + n * 8 + lane % 4 * 2;
      StoreBf16Pair(to, column, dim, merged.sums[n][h * 2] * inverse,
                    merged.sums[n][h * 2 + 1] * inverse);
    }
  }
}

template <int kDim>
void LaunchOf(const AttentionLaunch& args, cudaStream_t stream) {
  const int group = GroupOf(args);
  const int chunks = (group + kRows - 1) / kRows;
  Launch(SplitKernel<kDim>,
         {.grid = dim3(MaxItems(args), args.cache.num_kv_heads * chunks),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(SharedSplit<kDim>),
          .stream = stream,
          .overlaps_predecessor = true},
         args, SplitTokensOf(args), args.scale * kLog2E);
}

}  // namespace

void LaunchSplitMma(const AttentionLaunch& args, cudaStream_t stream) {
  if (args.cache.head_dim <= 64) {
    LaunchOf<64>(args, stream);
  } else if (args.cache.head_dim <= 128) {
    LaunchOf<128>(args, stream);
  } else {
    LaunchOf<256>(args, stream);
  }
}

}  // namespace moeserve::cuda

// Attention of single tokens over a bf16 cache on the tensor cores. A thread block computes the
// query heads of one token that share a kv head, padded to 16 rows, over one split of the context
// (or all splits, if the token is not split), so keys and values are read once for all of these
// heads. The four warps divide a tile's keys among them in the first product, and the head's
// columns in the second. Two tiles of keys and of values are in flight at any time; of values only
// one for heads wider than 128.
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;

template <int kDim>
struct SharedSplit {
  // With one buffer for the values of wide heads, two blocks share a multiprocessor.
  static constexpr int kValueBuffers = kDim > 128 ? 1 : 2;
  alignas(128) char keys[2][kTileKeys * kDim * 2];
  char values[kValueBuffers][kTileKeys * kDim * 2];
  char queries[kRows * kDim * 2];
  char weights[kRows * kTileKeys * 2];
  float maximum[kThreads / 32][kRows];
  float sum[kThreads / 32][kRows][4];  // chains of the sums of weights, one per lane of a row
  BlockRows<kRows> rows;
};

// The number of columns of the head that one warp computes in the second product.
template <int kDim>
constexpr int kColumns = kDim / 4;

// Raises `maximum`, which holds the largest score of each row over the warp's keys, to the largest
// score over the keys of all warps.
template <int kDim>
__device__ __forceinline__ void ShareMaximum(SharedSplit<kDim>& shared, int warp, int lane,
                                             float (&maximum)[2]) {
  if (lane % 4 == 0) {
    shared.maximum[warp][lane / 4] = maximum[0];
    shared.maximum[warp][lane / 4 + 8] = maximum[1];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      maximum[h] = fmaxf(maximum[h], shared.maximum[w][lane / 4 + h * 8]);
    }
  }
}

// Stores the softmax weights of the warp's keys in shared memory, and adds them to their sums.
template <int kDim>
__device__ __forceinline__ void StoreWeights(SharedSplit<kDim>& shared, int warp, int lane,
                                             float factor, float (&scores)[2][4],
                                             RowState<1>* state) {
  const float reference[2] = {Reference(state->maximum[0] * factor),
                              Reference(state->maximum[1] * factor)};
  uint32_t weights[4];
  Weigh(scores, 0, factor, reference, state->sum[0]);
  PackWeights(scores, 0, weights);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(
        PlaneAddress<kRows>(shared.weights, lane / 4 + i % 2 * 8, warp * 2 + i / 2) +
        lane % 4 * 4) = weights[i];
  }
}

// Returns the sums of weights of the thread's rows over the keys of all warps.
template <int kDim>
__device__ __forceinline__ void ShareSums(SharedSplit<kDim>& shared, int warp, int lane,
                                          const RowState<1>& state, float (&sum)[2]) {
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

template <int kDim>
__device__ __forceinline__ void StorePartial(const AttentionLaunch& a,
                                             const SharedSplit<kDim>& shared, int chunk,
                                             float* partial, const float (&maximum)[2],
                                             const float (&sum)[2],
                                             const float (&sums)[kColumns<kDim> / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int padded = a.cache.padded_dim;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    if (shared.rows.query_row[row] < 0) continue;
    float* to =
        partial + PartialRow(a, chunk, kRows, row, shared.rows.head[row]) * PartialStride(padded);
#pragma unroll
    for (int n = 0; n < kColumns<kDim> / 8; ++n) {
      const int column = warp * kColumns<kDim> + n * 8 + lane % 4 * 2;
      if (column < padded) {
        *reinterpret_cast<float2*>(to + column) = make_float2(sums[n][h * 2], sums[n][h * 2 + 1]);
      }
    }
    if (warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + padded) = make_float2(maximum[h], sum[h]);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void StoreFinished(const AttentionLaunch& a,
                                              const SharedSplit<kDim>& shared,
                                              const MergedRows<kColumns<kDim>>& merged) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int dim = a.cache.value_dim();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    if (shared.rows.query_row[row] < 0) continue;
    const float inverse = InverseOfSum(a, shared.rows.head[row], merged.maximum[h], merged.sum[h]);
    Bf16* to = static_cast<Bf16*>(a.output) + shared.rows.query_row[row] * a.output_stride +
               shared.rows.head[row] * dim;
#pragma unroll
    for (int n = 0; n < kColumns<kDim> / 8; ++n) {
      const int column = warp * kColumns<kDim> + n * 8 + lane % 4 * 2;
      StoreBf16Pair(to, column, dim, merged.sums[n][h * 2] * inverse,
                    merged.sums[n][h * 2 + 1] * inverse);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads)
    SplitKernel(const AttentionLaunch a, const int split_tokens, const float scale) {
  GridDependencyPass();
  const int item = blockIdx.x;
  if (item >= *a.work.item_count) return;
  const int token = a.work.item_token[item];
  const int split = a.work.item_split[item];
  const int kv_head = blockIdx.y % a.cache.num_kv_heads;
  const int chunk = blockIdx.y / a.cache.num_kv_heads;
  auto& shared = *DynamicShared<SharedSplit<kDim>>();
  BlockKeys range;
  if (!FindWork<kTileKeys>(a, token, token + 1, split, split_tokens, kv_head, chunk, &shared.rows,
                           &range)) {
    return;
  }
  constexpr int kValueBuffers = SharedSplit<kDim>::kValueBuffers;
  // The values of tile + kAhead are copied while tile is computed.
  constexpr int kAhead = kValueBuffers - 1;
  using Copies = TileCopies<kDim, kThreads, (kDim > 128)>;
  const Copies copies(a.cache, kv_head, range);
  const int first_tile = range.tiles.begin;
  // The blocks of the tile whose values, and of the one whose keys are copied next.
  typename Copies::Blocks of_values, of_keys;
  const auto copy_keys = [&](int tile, const typename Copies::Blocks& blocks) {
    if (tile < range.tiles.end) copies.StartKeys(shared.keys[tile % 2], tile, blocks);
    CopyAsyncCommit();
  };
  const auto copy_values = [&](int tile, const typename Copies::Blocks& blocks) {
    if (tile < range.tiles.end) {
      copies.StartValues(shared.values[tile % kValueBuffers], tile, blocks);
    }
    CopyAsyncCommit();
  };
  copies.Find(first_tile, of_values);
  copies.Find(first_tile + 1, of_keys);
  copy_keys(first_tile, of_values);
  if constexpr (kAhead == 1) copy_values(first_tile, of_values);
  copy_keys(first_tile + 1, of_keys);
  if constexpr (kAhead == 0) copies.Find(first_tile + 2, of_keys);
  LoadQueries<kDim, kRows, kThreads>(a, shared.rows, shared.queries);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SeenByAll seen = SeenByAllOf(shared.rows, 0, a.seen);
  const int split_tiles = split_tokens / kTileKeys;
  const float factor = FactorOf(a, scale).factor;
  RowState<1> state;
  float sums[kColumns<kDim> / 8][4] = {};
  MergedRows<kColumns<kDim>> merged;
  for (int tile = first_tile; tile < range.tiles.end; ++tile) {
    // Groups committed so far, oldest first: ..., keys(tile), values(tile) if kAhead is 1,
    // keys(tile + 1).
    CopyAsyncWait<1 + kAhead>();
    __syncthreads();
    if constexpr (kAhead == 1) {
      copy_values(tile + 1, of_keys);
      copies.Find(tile + 2, of_keys);
    } else {
      copy_values(tile, of_values);
    }
    float scores[2][4];
    Scores<kDim, kRows>(shared.queries, 0, shared.keys[tile % 2], warp * 16, scores);
    float maximum[2] = {state.maximum[0], state.maximum[1]};
    MaskAndMaximum(a, scale, shared.rows, 0, seen, tile * kTileKeys + warp * 16, scores, maximum);
    ShareMaximum(shared, warp, lane, maximum);
    const Rescaling rescaling = RaiseMaximum(maximum, factor, &state);
    StoreWeights(shared, warp, lane, factor, scores, &state);
    CopyAsyncWait<2 * kAhead>();
    __syncthreads();
    copy_keys(tile + 2, of_keys);
    if constexpr (kAhead == 0) {
      copies.Find(tile + 1, of_values);
      copies.Find(tile + 3, of_keys);
    }
    Rescale(rescaling, sums);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint32_t weights[4];
      LoadMatrix4(weights, PlaneAddress<kRows>(shared.weights, lane % 16, step * 2 + lane / 16));
      AddValues<kColumns<kDim>>(weights, shared.values[tile % kValueBuffers], step,
                                warp * kColumns<kDim>, sums);
    }
    if (split < 0 && ((tile + 1) % split_tiles == 0 || tile + 1 == range.tiles.end)) {
      float sum[2];
      MergeFactors f[2];
      ShareSums(shared, warp, lane, state, sum);
      MergeState(sum, factor, &state, merged.maximum, merged.sum, f);
      MergeValues(f, sums, merged.sums);
    }
  }
  if (split >= 0) {
    float sum[2];
    ShareSums(shared, warp, lane, state, sum);
    const float maximum[2] = {state.maximum[0] * factor, state.maximum[1] * factor};
    StorePartial(a, shared, chunk, PartialOf(a, token, split, split_tokens), maximum, sum, sums);
  } else {
    StoreFinished(a, shared, merged);
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
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() { LaunchOf<kDim>(args, stream); });
}

}  // namespace moeserve::cuda

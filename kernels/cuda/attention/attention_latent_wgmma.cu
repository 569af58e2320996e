// Attention over latent vectors by wgmma, for devices of compute capability 9.0: of single tokens
// with many heads, and of tiles of neighbouring tokens. A thread block computes 64 rows, of single
// tokens over one split. Each of its two warpgroups computes half of the columns of every plane of
// the first product, and half of the values; they exchange the scores, and both compute the
// softmax, so that the weights are in the registers where the second product needs them. wgmma
// reads queries, keys and values from shared memory, so an element of a tile is read once per
// product and 64 rows.
//
// The second product of a tile runs during the softmax of the next tile. No registers are left to
// merge splits: attention_latent_mma.cu computes the single tokens with several splits for which no
// slots are left. Blocks of tiles keep what they have merged in AttentionLaunch::tile_sums, which
// stays in the second-level cache; so no more blocks are launched than run at a time, and each of
// them computes several tiles.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/attention/attention_latent.cuh"
#include "kernels/cuda/attention/attention_latent_mma.h"
#include "kernels/cuda/attention/attention_wgmma.cuh"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kLatentRows = 64;
constexpr int kLatentGroups = 2;  // warpgroups
constexpr int kLatentGroupThreads = kLatentGroups * 128;
constexpr int kLatentStages = 3;

template <typename Width>
struct SharedLatentPlanes {
  alignas(1024) char vectors[kLatentStages][Width::kKeys * kLatentPlaneBytes];
  char queries[Width::kKeys * kLatentRows * kPlaneRowBytes];
  // What the columns of one warpgroup contribute to the scores of a tile, in the order of threads.
  float4 parts[kLatentGroups][kLatentKeys / 8][128];
  // The largest scores and sums of weights of each thread's two rows, merged so far.
  float4 merged[kLatentGroupThreads];
  BlockRows<kLatentRows> rows;
};

// Starts the products of columns [32 group, 32 group + 32) of every plane of the queries and a
// tile: those of the first and of the last 16 columns apart.
template <typename Width>
__device__ __forceinline__ void StartLatentScores(char* queries, char* vectors, int group,
                                                  float (&first)[kLatentKeys / 2],
                                                  float (&second)[kLatentKeys / 2]) {
  const uint64_t q = AdvanceDescriptor(
      MatrixDescriptor(queries, Swizzle::k128Bytes, 8 * kPlaneRowBytes), group * 64);
  const uint64_t k = AdvanceDescriptor(
      MatrixDescriptor(vectors, Swizzle::k128Bytes, 8 * kPlaneRowBytes), group * 64);
  WgmmaKeepInPlace(first);
  WgmmaKeepInPlace(second);
  WgmmaFence();
#pragma unroll
  for (int p = 0; p < Width::kKeys; ++p) {
    const uint64_t a = AdvanceDescriptor(q, p * kLatentRows * kPlaneRowBytes);
    const uint64_t b = AdvanceDescriptor(k, p * kLatentPlaneBytes);
    Wgmma<kLatentKeys>::Shared(first, a, b, p > 0);
    Wgmma<kLatentKeys>::Shared(second, AdvanceDescriptor(a, 32), AdvanceDescriptor(b, 32), p > 0);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(first);
  WgmmaKeepInPlace(second);
}

// Starts the product of the weights of a tile and the warpgroup's columns of its values.
template <int kColumns>
__device__ __forceinline__ void StartLatentValues(uint32_t (&weights)[kLatentSteps][4],
                                                  char* values, float (&sums)[kColumns / 2]) {
  const uint64_t v = TransposedDescriptor(values, kLatentPlaneBytes);
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(weights);
  WgmmaFence();
#pragma unroll
  for (int step = 0; step < kLatentSteps; ++step) {
    Wgmma<kColumns>::RegistersTransposed(sums, weights[step],
                                         AdvanceDescriptor(v, step * 16 * kPlaneRowBytes), true);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(sums);
}

// Waits for the products of the scores of a tile, and sets `first` to the sum of both warpgroups'
// parts. Contains a barrier; the next call must follow another one.
template <int kPending, typename Width>
__device__ __forceinline__ void SumLatentScores(SharedLatentPlanes<Width>& shared, int group,
                                                float (&first)[kLatentKeys / 2],
                                                float (&second)[kLatentKeys / 2]) {
  WgmmaWait<kPending>();
  WgmmaKeepInPlace(first);
  WgmmaKeepInPlace(second);
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int n = 0; n < kLatentKeys / 8; ++n) {
#pragma unroll
    for (int e = 4 * n; e < 4 * n + 4; ++e) first[e] += second[e];
    shared.parts[group][n][thread] =
        make_float4(first[4 * n], first[4 * n + 1], first[4 * n + 2], first[4 * n + 3]);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kLatentKeys / 8; ++n) {
    const float4 other = shared.parts[group ^ 1][n][thread];
    first[4 * n] += other.x, first[4 * n + 1] += other.y;
    first[4 * n + 2] += other.z, first[4 * n + 3] += other.w;
  }
}

// Replaces the scores of a tile by weights and adds these to their sums. Returns how the weighted
// values so far must be rescaled.
template <int kRows>
__device__ __forceinline__ Rescaling LatentSoftmax(const AttentionLaunch& a, float scale,
                                                   const BlockRows<kRows>& rows, int row,
                                                   const SeenByAll& seen, int tile,
                                                   float (&scores)[kLatentKeys / 2],
                                                   RowState<kLatentSteps>* state) {
  auto& fragments = AsFragments(scores);
  const float factor = FactorOf(a, scale).factor;
  float maximum[2] = {state->maximum[0], state->maximum[1]};
  MaskLatentScores(a, scale, rows, row, seen, tile * kLatentKeys, fragments, maximum);
  const Rescaling rescaling = RaiseMaximum(maximum, factor, state);
  const float reference[2] = {Reference(maximum[0] * factor), Reference(maximum[1] * factor)};
#pragma unroll
  for (int step = 0; step < kLatentSteps; ++step) {
    Weigh(fragments, step, factor, reference, state->sum[step]);
  }
  return rescaling;
}

// Rounds the weights of a tile to the left operand of the second product. This must not happen
// while a product reads that operand.
template <int kSteps>
__device__ __forceinline__ void PackLatentWeights(float (&scores)[kSteps * 8],
                                                  uint32_t (&weights)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    PackWeights(AsFragments(scores), step, weights[step]);
  }
}

// Waits for all products. Until then, nothing may access the registers that they use.
template <int kCount>
__device__ __forceinline__ void FinishLatentValues(uint32_t (&weights)[kLatentSteps][4],
                                                   float (&sums)[kCount]) {
  WgmmaWait<0>();
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(weights);
}

// Merges a finished split, the `first` one or not, as MergeState() and MergeValues() do. The
// weighted values that are merged so far are in `stash`; with `last`, those of all splits are in
// `sums` afterwards.
template <int kCount>
__device__ __forceinline__ void MergeLatentSums(bool first, bool last, float factor,
                                                RowState<kLatentSteps>* state, float4* merged,
                                                float4* stash, float (&sums)[kCount]) {
  float sum[2];
  SumOfWeights(*state, sum);
  const float4 m = first ? make_float4(kMinusInfinity, kMinusInfinity, 0.0f, 0.0f) : *merged;
  float maximum[2] = {m.x, m.y}, merged_sum[2] = {m.z, m.w};
  MergeFactors f[2];
  MergeState(sum, factor, state, maximum, merged_sum, f);
  *merged = make_float4(maximum[0], maximum[1], merged_sum[0], merged_sum[1]);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float4* const own = stash + i / 4 * kLatentGroupThreads;
    float4 v = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *own;
    v.x = fmaf(sums[i], f[0].split, v.x * f[0].merged);
    v.y = fmaf(sums[i + 1], f[0].split, v.y * f[0].merged);
    v.z = fmaf(sums[i + 2], f[1].split, v.z * f[1].merged);
    v.w = fmaf(sums[i + 3], f[1].split, v.w * f[1].merged);
    if (!last) *own = v;
    sums[i] = last ? v.x : 0.0f, sums[i + 1] = last ? v.y : 0.0f;
    sums[i + 2] = last ? v.z : 0.0f, sums[i + 3] = last ? v.w : 0.0f;
  }
}

// Computes the rows of `chunk` of tokens [begin, end), which belong to one sequence: of a single
// token over one split or, with split -1, over a context of one split; with kTiled, over all
// splits. `stash` is the thread's place in the block's part of tile_sums.
template <bool kTiled, typename Width>
__device__ __forceinline__ void LatentWgmmaRun(const AttentionLaunch& a, int begin, int end,
                                               int split, int split_tokens, int chunk, float scale,
                                               SharedLatentPlanes<Width>& shared, float4* stash) {
  constexpr int kColumns = Width::kValues / kLatentGroups * kPlaneColumns;
  BlockKeys range;
  if (!FindWork<kLatentKeys>(a, begin, end, split, split_tokens, 0, chunk, &shared.rows, &range)) {
    return;
  }
  if (!kTiled && SplitsOf(range, split_tokens) > 1) return;
  const int first_tile = range.tiles.begin, last_tile = range.tiles.end - 1;
  using Copies = LatentCopies<Width, kLatentGroupThreads>;
  const Copies copies(a.cache, range);
  typename Copies::Blocks blocks;
  const auto copy = [&](int tile) {
    if (tile <= last_tile) copies.Start(shared.vectors[tile % kLatentStages], tile, blocks);
    CopyAsyncCommit();
    copies.Find(tile + 1, blocks);
  };
  copies.Find(first_tile, blocks);
  copy(first_tile);
  copy(first_tile + 1);
  LoadQueries<Width::kKeys * kPlaneColumns, kLatentRows, kLatentGroupThreads>(a, shared.rows,
                                                                              shared.queries);
  // The shuffle makes it uniform for the compiler, as descriptors should be.
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 128, 0);
  const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  const SeenByAll seen = SeenByAllOf(shared.rows, row, a.seen);
  const float factor = FactorOf(a, scale).factor;
  const int split_tiles = split_tokens / kLatentKeys;  // a power of two
  // Merges the split whose last tile is `tile`.
  const auto merge = [&](int tile, bool last, auto* of_rows, auto& of_values) {
    const bool is_first = !kTiled || (tile & -split_tiles) <= first_tile;
    MergeLatentSums(is_first, last, factor, of_rows, &shared.merged[threadIdx.x], stash, of_values);
  };
  RowState<kLatentSteps> state;
  float sums[kColumns / 2] = {};
  float first[kLatentKeys / 2], second[kLatentKeys / 2];
  uint32_t weights[kLatentSteps][4] = {};
  const auto vectors_of = [&](int tile) { return shared.vectors[tile % kLatentStages]; };
  const auto values_of = [&](int tile) {
    return vectors_of(tile) + group * (Width::kValues / kLatentGroups * kLatentPlaneBytes);
  };
  CopyAsyncWait<1>();
  FenceAsyncShared();
  __syncthreads();
  StartLatentScores<Width>(shared.queries, vectors_of(first_tile), group, first, second);
  SumLatentScores<0>(shared, group, first, second);
  LatentSoftmax(a, scale, shared.rows, row, seen, first_tile, first, &state);
  PackLatentWeights(first, weights);
  for (int tile = first_tile; tile < last_tile; ++tile) {
    CopyAsyncWait<0>();
    FenceAsyncShared();
    // Afterwards the next tile is visible, and no product reads the tile before this one.
    __syncthreads();
    copy(tile + 2);
    StartLatentScores<Width>(shared.queries, vectors_of(tile + 1), group, first, second);
    StartLatentValues<kColumns>(weights, values_of(tile), sums);
    SumLatentScores<1>(shared, group, first, second);
    if (kTiled && ((tile + 1) & (split_tiles - 1)) == 0) {
      FinishLatentValues(weights, sums);
      merge(tile, false, &state, sums);
    }
    const Rescaling rescaling =
        LatentSoftmax(a, scale, shared.rows, row, seen, tile + 1, first, &state);
    FinishLatentValues(weights, sums);
    Rescale(rescaling, AsFragments(sums));
    PackLatentWeights(first, weights);
  }
  StartLatentValues<kColumns>(weights, values_of(last_tile), sums);
  FinishLatentValues(weights, sums);

  const auto column_of = [&](int n) {
    return group * kColumns + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  };
  if (!kTiled && split >= 0) {
    float sum[2];
    SumOfWeights(state, sum);
    const float maximum[2] = {state.maximum[0] * factor, state.maximum[1] * factor};
    StoreLatentPartial(a, shared.rows, chunk, row, group == 0, column_of,
                       PartialOf(a, begin, split, split_tokens), maximum, sum, AsFragments(sums));
    return;
  }
  merge(last_tile, true, &state, sums);
  const float4 m = shared.merged[threadIdx.x];
  StoreLatentFinished(a, shared.rows, row, column_of, {m.x, m.y}, {m.z, m.w}, AsFragments(sums));
}

template <typename Width>
__global__ void __launch_bounds__(kLatentGroupThreads, 1)
    LatentWgmmaKernel(const AttentionLaunch a, const int split_tokens, const float scale) {
  if constexpr (MOESERVE_HAS_SM90A) {
    GridDependencyPass();
    const int item = static_cast<int>(blockIdx.x);
    if (item >= *a.work.item_count) return;
    const int token = a.work.item_token[item];
    LatentWgmmaRun<false>(a, token, token + 1, a.work.item_split[item], split_tokens,
                          static_cast<int>(blockIdx.y), scale,
                          *DynamicShared<SharedLatentPlanes<Width>>(), nullptr);
  } else {
    // The host selects the kernel by the device's capability, so this code does not run.
    __trap();
  }
}

// The float4 that a block has in tile_sums.
template <typename Width>
constexpr int kLatentStash = Width::kValues* kPlaneColumns* kLatentRows / 4;

template <typename Width>
__global__ void __launch_bounds__(kLatentGroupThreads, 1)
    LatentTiledWgmmaKernel(const AttentionLaunch a, const int tokens_per_tile, const int tiles,
                           const int chunks, const int split_tokens, const float scale) {
  if constexpr (MOESERVE_HAS_SM90A) {
    GridDependencyPass();
    auto& shared = *DynamicShared<SharedLatentPlanes<Width>>();
    float4* const stash = reinterpret_cast<float4*>(a.tile_sums) +
                          static_cast<int>(blockIdx.x) * kLatentStash<Width> + threadIdx.x;
    // The last tiles, which have the longest contexts, are the first.
    for (int item = static_cast<int>(blockIdx.x); item < tiles * chunks;
         item += static_cast<int>(gridDim.x)) {
      const int first_token = a.tiled_from + (tiles - 1 - item / chunks) * tokens_per_tile;
      ForEachRun(a, first_token, tokens_per_tile, shared.rows, [&](int begin, int end) {
        LatentWgmmaRun<true>(a, begin, end, -1, split_tokens, item % chunks, scale, shared, stash);
      });
    }
  } else {
    __trap();
  }
}

// The blocks that run at a time.
int TileBlocks() { return DeviceAttribute(cudaDevAttrMultiProcessorCount); }

}  // namespace

int64_t LatentTileSumsBytes(const KvLayerView& cache) {
  if (!LatentWgmmaFits(cache)) return 0;
  int64_t bytes = 0;
  WithLatentWidth(cache, [&]<typename Width>() {
    bytes = int64_t{TileBlocks()} * kLatentStash<Width> * static_cast<int64_t>(sizeof(float4));
  });
  return bytes;
}

void LaunchLatentTiledWgmma(const AttentionLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.tile_sums != nullptr, "memory for the sums of tiles");
  const TiledShape shape = TiledShapeOf(args, kLatentRows);
  WithLatentWidth(args.cache, [&]<typename Width>() {
    if constexpr (Width::kValues % kLatentGroups == 0) {
      const int blocks = std::min(TileBlocks(), shape.tiles * shape.chunks);
      Launch(LatentTiledWgmmaKernel<Width>,
             {.grid = dim3(static_cast<unsigned>(blocks)),
              .block = dim3(kLatentGroupThreads),
              .shared_bytes = sizeof(SharedLatentPlanes<Width>),
              .stream = stream,
              .overlaps_predecessor = true},
             args, shape.tokens_per_tile, shape.tiles, shape.chunks, SplitTokensOf(args),
             args.scale * kLog2E);
    } else {
      MOESERVE_CHECK(false, "LatentWgmmaFits()");
    }
  });
}

bool LatentWgmmaFits(const KvLayerView& cache) {
  bool two_groups = false;
  WithLatentWidth(cache,
                  [&]<typename Width>() { two_groups = Width::kValues % kLatentGroups == 0; });
  return two_groups && TiledWgmmaFits();
}

void LaunchLatentSplitWgmma(const AttentionLaunch& args, cudaStream_t stream) {
  const int chunks = (args.heads + kLatentRows - 1) / kLatentRows;
  WithLatentWidth(args.cache, [&]<typename Width>() {
    if constexpr (Width::kValues % kLatentGroups == 0) {
      static_assert(sizeof(SharedLatentPlanes<Width>) <= 227 << 10);
      Launch(LatentWgmmaKernel<Width>,
             {.grid = dim3(static_cast<unsigned>(MaxItems(args)), static_cast<unsigned>(chunks)),
              .block = dim3(kLatentGroupThreads),
              .shared_bytes = sizeof(SharedLatentPlanes<Width>),
              .stream = stream,
              .overlaps_predecessor = true},
             args, SplitTokensOf(args), args.scale * kLog2E);
    } else {
      MOESERVE_CHECK(false, "LatentWgmmaFits()");
    }
  });
  const int64_t splits = MaxSplits(args.step.max_context, args.seen, SplitTokensOf(args));
  if (splits > 1 && splits * args.tiled_from > args.work.slots) {
    LaunchLatentSplitMma(args, true, stream);
  }
}

}  // namespace moeserve::cuda

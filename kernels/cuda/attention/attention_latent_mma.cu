// Attention over the latent vectors of a bf16 cache on the tensor cores ("DeepSeek-V2", section
// 2.1): all query heads read one kv head, whose values are the first elements of its keys, so a
// tile of vectors is copied once to shared memory and read by both products.
//
// A thread block computes 16 rows, or 32 where a token has more heads and in tiles of neighbouring
// tokens. A row is a pair of a token and a head. The four warps of 16 rows divide the columns among
// them: of every plane of 64 columns, warp w has columns [16 w, 16 w + 16), in both products. So a
// warp keeps its part of the queries in registers for the whole context, and every element of a
// tile is read from shared memory once per product and 16 rows. The warps exchange their parts of
// the scores. Then each of them computes the softmax of all scores, because this costs less than
// one more barrier, and the weights are where the second product needs them.
#include "base/check.h"
#include "kernels/cuda/attention/attention_latent.cuh"
#include "kernels/cuda/attention/attention_latent_mma.h"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kColumnWarps = 4;  // warps that divide the columns of 16 rows
static_assert(kPlaneColumns == kColumnWarps * 16);

// What a block computes. It is read from shared memory where it is needed, because the sums take
// most registers.
struct LatentJob {
  BlockKeys keys;
  int token;  // the first one
  int split;  // -1: all splits
};

template <typename Width, int kRowTiles>
struct SharedLatent {
  static_assert(kRowTiles * 16 <= kLatentKeys);  // a buffer holds the queries, too
  alignas(128) char vectors[2][Width::kKeys * kLatentPlaneBytes];
  // The scores that the columns of one warp contribute, in the order of its lanes.
  float4 parts[kRowTiles][kColumnWarps][kLatentKeys / 8][32];
  // The largest scores and sums of weights of each thread's two rows, merged so far.
  float4 merged[kRowTiles * kColumnWarps * 32];
  BlockRows<kRowTiles * 16> rows;
  LatentJob job;
};

// Loads the warp's columns of the queries of 16 rows, from where LoadQueries() has written those of
// kRows rows, as left operands of the first product.
template <typename Width, int kRows>
__device__ __forceinline__ void LoadLatentQueries(char* from, int row, int part,
                                                  uint32_t (&queries)[Width::kKeys][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  char* const own = PlaneAddress<kRows>(from, row + lane % 16, 2 * part + lane / 16);
#pragma unroll
  for (int p = 0; p < Width::kKeys; ++p) {
    LoadMatrix4(queries[p], own + p * (kRows * kPlaneRowBytes));
  }
}

// Computes what columns [16 part, 16 part + 16) of each plane contribute to the scores of a tile.
template <typename Width>
__device__ __forceinline__ void LatentScores(const uint32_t (&queries)[Width::kKeys][4],
                                             char* vectors, int part,
                                             float (&scores)[kLatentKeys / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  char* const own =
      PlaneAddress<kLatentKeys>(vectors, lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < kLatentKeys / 8; ++n) {
    scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
  }
#pragma unroll
  for (int p = 0; p < Width::kKeys; ++p) {
#pragma unroll
    for (int step = 0; step < kLatentSteps; ++step) {
      uint32_t k[4];
      LoadMatrix4(k, own + p * kLatentPlaneBytes + step * (16 * kPlaneRowBytes));
      MmaBf16(scores[2 * step], queries[p], {k[0], k[1]});
      MmaBf16(scores[2 * step + 1], queries[p], {k[2], k[3]});
    }
  }
}

// Replaces the warp's part of the scores of 16 rows by the sum of all parts, which is the same for
// all four warps. Contains a barrier; the next call must follow another one.
template <int kCount>
__device__ __forceinline__ void SumParts(float4 (&parts)[kColumnWarps][kCount][32], int part,
                                         float (&scores)[kCount][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    parts[part][n][lane] = make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const float4 x = parts[part ^ 1][n][lane];
    const float4 y = parts[part ^ 2][n][lane], z = parts[part ^ 3][n][lane];
    scores[n][0] = (scores[n][0] + x.x) + (y.x + z.x);
    scores[n][1] = (scores[n][1] + x.y) + (y.y + z.y);
    scores[n][2] = (scores[n][2] + x.z) + (y.z + z.z);
    scores[n][3] = (scores[n][3] + x.w) + (y.w + z.w);
  }
}

// Adds the weights of keys [16 step, 16 step + 16) of the tile times the warp's columns of their
// values.
template <typename Width>
__device__ __forceinline__ void AddLatentValues(const uint32_t (&weights)[4], char* vectors,
                                                int step, int part,
                                                float (&sums)[Width::kPairs][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  char* const own = PlaneAddress<kLatentKeys>(vectors, lane % 16, 2 * part + lane / 16) +
                    step * (16 * kPlaneRowBytes);
#pragma unroll
  for (int p = 0; p < Width::kValues; ++p) {
    uint32_t v[4];
    LoadMatrix4Transposed(v, own + p * kLatentPlaneBytes);
    MmaBf16(sums[2 * p], weights, {v[0], v[1]});
    MmaBf16(sums[2 * p + 1], weights, {v[2], v[3]});
  }
}

// Returns the column of sums[n][0] and sums[n][2] of the warp with columns `part`.
__device__ __forceinline__ int LatentColumn(int part, int n) {
  return n / 2 * kPlaneColumns + part * 16 + n % 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
}

// As MergeState() and MergeValues(), with the maxima and sums of weights of both rows merged so far
// in *merged_state: no register is left for what is used once per split.
template <int kCount>
__device__ __forceinline__ void MergeLatent(float factor, RowState<kLatentSteps>* state,
                                            float4* merged_state, float (&sums)[kCount][4],
                                            float (&merged)[kCount][4]) {
  float sum[2];
  SumOfWeights(*state, sum);
  float4 m = *merged_state;
  float merged_maximum[2] = {m.x, m.y}, merged_sum[2] = {m.z, m.w};
  MergeFactors f[2];
  MergeState(sum, factor, state, merged_maximum, merged_sum, f);
  *merged_state = make_float4(merged_maximum[0], merged_maximum[1], merged_sum[0], merged_sum[1]);
  MergeValues(f, sums, merged);
}

// Computes rows [chunk * kRows, (chunk + 1) * kRows) of tokens [begin, end), which belong to one
// sequence, over one split of their context or, with split -1, over all splits; -1 is the only one
// without kSplit.
template <bool kSplit, typename Width, int kRowTiles>
__device__ __forceinline__ void LatentRun(const AttentionLaunch& a, int begin, int end, int split,
                                          int split_tokens, int chunk, float scale,
                                          SharedLatent<Width, kRowTiles>& shared) {
  using Copies = LatentCopies<Width, kRowTiles * kColumnWarps * 32>;
  BlockKeys range;
  if (!FindWork<kLatentKeys>(a, begin, end, split, split_tokens, 0, chunk, &shared.rows, &range)) {
    return;
  }
  const int first_tile = range.tiles.begin;
  if (threadIdx.x == 0) shared.job = {range, begin, split};
  __syncthreads();
  const LatentJob& job = shared.job;
  const Copies copies(a.cache, job.keys);
  typename Copies::Blocks blocks;
  copies.Find(first_tile, blocks);
  copies.Start(shared.vectors[first_tile % 2], first_tile, blocks);
  CopyAsyncCommit();
  copies.Find(first_tile + 1, blocks);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int part = warp % kColumnWarps, row_tile = warp / kColumnWarps, row = row_tile * 16;
  // The queries pass through the buffer of the second tile, whose copies begin behind a barrier.
  constexpr int kRows = kRowTiles * 16, kThreads = kRowTiles * kColumnWarps * 32;
  char* const staged = shared.vectors[(first_tile + 1) % 2];
  LoadQueries<Width::kKeys * kPlaneColumns, kRows, kThreads>(a, shared.rows, staged);
  __syncthreads();
  uint32_t queries[Width::kKeys][4];
  LoadLatentQueries<Width, kRows>(staged, row, part, queries);
  const SeenByAll seen = SeenByAllOf(shared.rows, row, a.seen);
  const int split_tiles = split_tokens / kLatentKeys;
  const float factor = FactorOf(a, scale).factor;
  RowState<kLatentSteps> state;
  float sums[Width::kPairs][4] = {};
  float merged[Width::kPairs][4] = {};
  shared.merged[threadIdx.x] = make_float4(kMinusInfinity, kMinusInfinity, 0.0f, 0.0f);
  for (int tile = first_tile; tile < job.keys.tiles.end; ++tile) {
    CopyAsyncWait<0>();
    __syncthreads();
    char* const vectors = shared.vectors[tile % 2];
    if (tile + 1 < job.keys.tiles.end)
      copies.Start(shared.vectors[(tile + 1) % 2], tile + 1, blocks);
    CopyAsyncCommit();
    copies.Find(tile + 2, blocks);
    float scores[kLatentKeys / 8][4];
    LatentScores<Width>(queries, vectors, part, scores);
    SumParts(shared.parts[row_tile], part, scores);
    float maximum[2] = {state.maximum[0], state.maximum[1]};
    MaskLatentScores(a, scale, shared.rows, row, seen, tile * kLatentKeys, scores, maximum);
    const float reference[2] = {Reference(maximum[0] * factor), Reference(maximum[1] * factor)};
    Rescale(RaiseMaximum(maximum, factor, &state), sums);
#pragma unroll
    for (int step = 0; step < kLatentSteps; ++step) {
      uint32_t weights[4];
      Weigh(scores, step, factor, reference, state.sum[step]);
      PackWeights(scores, step, weights);
      AddLatentValues<Width>(weights, vectors, step, part, sums);
    }
    if ((!kSplit || job.split < 0) &&
        ((tile + 1) % split_tiles == 0 || tile + 1 == job.keys.tiles.end)) {
      MergeLatent(factor, &state, &shared.merged[threadIdx.x], sums, merged);
    }
  }
  const auto column_of = [&](int n) { return LatentColumn(part, n); };
  if (kSplit && job.split >= 0) {
    float sum[2];
    SumOfWeights(state, sum);
    const float maximum[2] = {state.maximum[0] * factor, state.maximum[1] * factor};
    StoreLatentPartial(a, shared.rows, chunk, row, part == 0, column_of,
                       PartialOf(a, job.token, job.split, split_tokens), maximum, sum, sums);
  } else {
    const float4 m = shared.merged[threadIdx.x];
    StoreLatentFinished(a, shared.rows, row, column_of, {m.x, m.y}, {m.z, m.w}, merged);
  }
}

// Returns whether a work item has several splits.
__device__ __forceinline__ bool LacksSlots(const AttentionLaunch& a, int token, int split,
                                           int split_tokens) {
  const int sequence = a.step.sequence[token], position = a.step.position[token];
  if (split >= 0 || sequence < 0) return false;
  const int last = LastKey(a.seen, position, LengthOf(a.step, a.seen, sequence));
  return last / split_tokens > FirstKey(a.seen, position) / split_tokens;
}

template <int kRowTiles>
constexpr int kLatentThreads = kRowTiles* kColumnWarps * 32;

template <typename Width, int kRowTiles>
__global__ void __launch_bounds__(kLatentThreads<kRowTiles>, 2 / kRowTiles)
    LatentSplitKernel(const AttentionLaunch a, const int split_tokens, const float scale,
                      const bool only_without_slots) {
  GridDependencyPass();
  const int item = static_cast<int>(blockIdx.x);
  if (item >= *a.work.item_count) return;
  const int token = a.work.item_token[item], split = a.work.item_split[item];
  if (only_without_slots && !LacksSlots(a, token, split, split_tokens)) return;
  LatentRun<true>(a, token, token + 1, split, split_tokens, static_cast<int>(blockIdx.y), scale,
                  *DynamicShared<SharedLatent<Width, kRowTiles>>());
}

template <typename Width, int kRowTiles>
__global__ void __launch_bounds__(kLatentThreads<kRowTiles>, 2 / kRowTiles)
    LatentTiledKernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tokens,
                      const float scale) {
  GridDependencyPass();
  auto& shared = *DynamicShared<SharedLatent<Width, kRowTiles>>();
  const int first_token = TileOfBlock(a, tokens_per_tile);
  ForEachRun(a, first_token, tokens_per_tile, shared.rows, [&](int begin, int end) {
    LatentRun<false>(a, begin, end, -1, split_tokens, static_cast<int>(blockIdx.y), scale, shared);
  });
}

constexpr int kTiledRowTiles = 2;

template <typename Width, int kRowTiles>
void LaunchSplitOf(const AttentionLaunch& args, bool only_without_slots, cudaStream_t stream) {
  const int chunks = (args.heads + kRowTiles * 16 - 1) / (kRowTiles * 16);
  Launch(LatentSplitKernel<Width, kRowTiles>,
         {.grid = dim3(static_cast<unsigned>(MaxItems(args)), static_cast<unsigned>(chunks)),
          .block = dim3(kLatentThreads<kRowTiles>),
          .shared_bytes = sizeof(SharedLatent<Width, kRowTiles>),
          .stream = stream,
          .overlaps_predecessor = true},
         args, SplitTokensOf(args), args.scale * kLog2E, only_without_slots);
}

}  // namespace

int64_t LatentMmaSharedBytes(const KvLayerView& cache) {
  int64_t bytes = 0;
  WithLatentWidth(cache,
                  [&]<typename Width>() { bytes = sizeof(SharedLatent<Width, kTiledRowTiles>); });
  return bytes;
}

bool FitsLatentMma(const KvLayerView& cache, DType output_dtype) {
  return cache.type == KvCacheType::kBF16 && output_dtype == DType::kBF16 &&
         LatentMmaSharedBytes(cache) > 0;
}

void LaunchLatentSplitMma(const AttentionLaunch& args, bool only_without_slots,
                          cudaStream_t stream) {
  const bool fits = WithLatentWidth(args.cache, [&]<typename Width>() {
    (args.heads <= 16 ? LaunchSplitOf<Width, 1> : LaunchSplitOf<Width, 2>)(args, only_without_slots,
                                                                           stream);
  });
  MOESERVE_CHECK(fits, "the width of latent vectors");
}

void LaunchLatentTiledMma(const AttentionLaunch& args, cudaStream_t stream) {
  const TiledShape shape = TiledShapeOf(args, kTiledRowTiles * 16);
  const bool fits = WithLatentWidth(args.cache, [&]<typename Width>() {
    Launch(LatentTiledKernel<Width, kTiledRowTiles>,
           {.grid = dim3(static_cast<unsigned>(shape.tiles), static_cast<unsigned>(shape.chunks)),
            .block = dim3(kLatentThreads<kTiledRowTiles>),
            .shared_bytes = sizeof(SharedLatent<Width, kTiledRowTiles>),
            .stream = stream,
            .overlaps_predecessor = true},
           args, shape.tokens_per_tile, SplitTokensOf(args), args.scale * kLog2E);
  });
  MOESERVE_CHECK(fits, "the width of latent vectors");
}

}  // namespace moeserve::cuda

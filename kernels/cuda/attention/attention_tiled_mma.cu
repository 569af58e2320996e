// Attention of many neighbouring tokens over a bf16 cache on the tensor cores, for devices without
// wgmma (attention_tiled_wgmma.cu). A thread block
// computes 64 rows over their whole context; a row is a pair of a token and one of the query heads
// that share a kv head. Each warp computes 16 rows. The copies of keys overlap with the softmax and
// the second product, the copies of values with the first product. The results of splits are merged
// in the same way as for single tokens. That costs a second set of accumulators (in shared memory
// for the widest heads), but makes a row's bits equal in both kernels.
#include "kernels/cuda/attention/attention_tiled.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 64;

template <int kDim>
struct SharedTiles {
  alignas(128) char keys[kTileKeys * kDim * 2];
  char values[kTileKeys * kDim * 2];
  char queries[kRows * kDim * 2];
  Stash<kDim, kThreads> stash;
  BlockRows<kRows> rows;
};

// Computes rows [chunk * kRows, (chunk + 1) * kRows) of tokens [begin, end), which belong to one
// sequence.
template <int kDim>
__device__ inline void TiledRun(const AttentionLaunch& a, int begin, int end, int kv_head,
                                int chunk, int split_tiles, float scale,
                                SharedTiles<kDim>& shared) {
  BlockKeys range;
  if (!FindWork<kTileKeys>(a, begin, end, -1, 0, kv_head, chunk, &shared.rows, &range)) return;
  const TileCopies<kDim, kThreads, true> copies(a.cache, kv_head, range);
  typename TileCopies<kDim, kThreads, true>::Blocks blocks;
  copies.Find(range.tiles.begin, blocks);
  copies.StartKeys(shared.keys, range.tiles.begin, blocks);
  CopyAsyncCommit();
  LoadQueries<kDim, kRows, kThreads>(a, shared.rows, shared.queries);

  const int warp_row = threadIdx.x / 32 * 16;
  const KeysOfWarp keys = FindKeysOfWarp(shared.rows, warp_row, a.seen);
  const float factor = FactorOf(a, scale).factor;
  RowState<kTileSteps> state;
  float sums[kDim / 8][4] = {};
  Merged<kDim> merged;
  const int first_split = range.tiles.begin / split_tiles;
  for (int tile = range.tiles.begin; tile < range.tiles.end; ++tile) {
    const int key = tile * kTileKeys;
    // A tile that no row of the warp sees would not change the sums.
    const bool seen = key <= keys.last && key + kTileKeys > keys.first;
    CopyAsyncWait<0>();
    __syncthreads();
    copies.StartValues(shared.values, tile, blocks);
    CopyAsyncCommit();
    copies.Find(tile + 1, blocks);
    float scores[kTileKeys / 8][4];
    if (seen) Scores<kDim, kRows>(shared.queries, warp_row, shared.keys, 0, scores);
    __syncthreads();
    if (tile + 1 < range.tiles.end) copies.StartKeys(shared.keys, tile + 1, blocks);
    CopyAsyncCommit();
    uint32_t weights[kTileSteps][4];
    if (seen) {
      // Computed for each tile, because no register is left to keep it.
      const RowPair pair = RowPairOf(shared.rows, warp_row, a.seen);
      const SeenByAll seen_by_all{max(pair.first[0], pair.first[1]),
                                  min(pair.last[0], pair.last[1])};
      float maximum[2] = {state.maximum[0], state.maximum[1]};
      MaskAndMaximum(a, scale, shared.rows, warp_row, seen_by_all, key, scores, maximum);
      const float reference[2] = {Reference(maximum[0] * factor), Reference(maximum[1] * factor)};
      Rescale(RaiseMaximum(maximum, factor, &state), sums);
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) {
        Weigh(scores, step, factor, reference, state.sum[step]);
        PackWeights(scores, step, weights[step]);
      }
    }
    CopyAsyncWait<1>();
    __syncthreads();
    if (seen) {
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) {
        AddValues<kDim>(weights[step], shared.values, step, 0, sums);
      }
    }
    if ((tile + 1) % split_tiles == 0 || tile + 1 == range.tiles.end) {
      const bool first = tile / split_tiles == first_split;
      MergeFactors f[2];
      MergeTiledState(first, factor, &state, &merged, &shared.stash, f);
      MergeTiledValues(first, f, sums, &merged, &shared.stash);
    }
  }
  StoreFinished<kDim>(a, shared.rows, warp_row, merged, shared.stash);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads)
    TiledKernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tiles,
                const float scale) {
  GridDependencyPass();
  auto& shared = *DynamicShared<SharedTiles<kDim>>();
  ForEachRun(a, tokens_per_tile, shared.rows, [&](int begin, int end) {
    TiledRun<kDim>(a, begin, end, blockIdx.y, blockIdx.z, split_tiles, scale, shared);
  });
}

template <int kDim>
void LaunchOf(const AttentionLaunch& args, cudaStream_t stream) {
  // The shared memory limit of devices of compute capability 8.0.
  static_assert(sizeof(SharedTiles<kDim>) <= 163 << 10);
  LaunchTiles(TiledKernel<kDim>, kRows, kThreads, sizeof(SharedTiles<kDim>), args, stream);
}

}  // namespace

void LaunchTiledMma(const AttentionLaunch& args, cudaStream_t stream) {
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() { LaunchOf<kDim>(args, stream); });
}

}  // namespace moeserve::cuda

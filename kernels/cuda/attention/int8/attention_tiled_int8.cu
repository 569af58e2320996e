// Attention of many neighbouring tokens over an int8 cache on the tensor cores, as
// attention_tiled_mma.cu computes it over a bf16 cache: a thread block computes 64 rows over their
// whole context, each warp 16 of them. All warps multiply all keys, so each tile of keys or values
// is widened to bf16 once, in shared memory. Keys and values take turns in one buffer of integers
// and one of bf16: the values of a tile are copied while its scores are computed, and the keys of
// the next tile while the values are added. The bits are those of single tokens.
#include "kernels/cuda/attention/attention_tiled.cuh"
#include "kernels/cuda/attention/int8/int8_tiles.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 64;

template <int kDim>
struct SharedInt8Tiles {
  alignas(128) char integers[kInt8TileBytes<kDim>];
  char tile[kTileKeys * kDim * 2];
  char queries[kRows * kDim * 2];
  TileScales scales;
  Stash<kDim, kThreads> stash;
  BlockRows<kRows> rows;
};

// Replaces the products of a tile's keys by weights, rounded to bf16, and adds the weights to their
// sums.
template <int kCount>
__device__ __forceinline__ void WeighTile(const AttentionLaunch& a, float scale, float factor,
                                          const BlockRows<kRows>& rows, int warp_row, int key,
                                          const TileScales& scales,
                                          float (&scores)[kTileKeys / 8][4],
                                          RowState<kTileSteps>* state, float (&sums)[kCount][4],
                                          uint32_t (&weights)[kTileSteps][4]) {
  ScaleKeys(scales.keys, 0, scores);
  const RowPair pair = RowPairOf(rows, warp_row, a.seen);
  const SeenByAll seen{max(pair.first[0], pair.first[1]), min(pair.last[0], pair.last[1])};
  float maximum[2] = {state->maximum[0], state->maximum[1]};
  MaskAndMaximum(a, scale, rows, warp_row, seen, key, scores, maximum);
  const float reference[2] = {Reference(maximum[0] * factor), Reference(maximum[1] * factor)};
  Rescale(RaiseMaximum(maximum, factor, state), sums);
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    Weigh(scores, step, factor, reference, state->sum[step]);
  }
  ScaleKeys(scales.values, 0, scores);
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) PackWeights(scores, step, weights[step]);
}

// Computes rows [chunk * kRows, (chunk + 1) * kRows) of tokens [begin, end), which belong to one
// sequence.
template <int kDim>
__device__ inline void TiledRun(const AttentionLaunch& a, int begin, int end, int kv_head,
                                int chunk, int split_tiles, float scale,
                                SharedInt8Tiles<kDim>& shared) {
  BlockKeys range;
  if (!FindWork<kTileKeys>(a, begin, end, -1, 0, kv_head, chunk, &shared.rows, &range)) return;
  const Int8TileCopies<kDim, kThreads> copies(a.cache, kv_head, range);
  typename Int8TileCopies<kDim, kThreads>::Blocks blocks;
  copies.Find(range.tiles.begin, blocks);
  copies.StartKeys(shared.integers, range.tiles.begin, blocks);
  copies.StartScales(&shared.scales, range.tiles.begin, blocks);
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
    __syncthreads();  // the values of the tile before have been added
    copies.Widen(shared.integers, shared.tile);
    __syncthreads();
    copies.StartValues(shared.integers, tile, blocks);
    CopyAsyncCommit();
    copies.Find(tile + 1, blocks);
    uint32_t weights[kTileSteps][4];
    if (seen) {
      float scores[kTileKeys / 8][4];
      Scores<kDim, kRows>(shared.queries, warp_row, shared.tile, 0, scores);
      WeighTile(a, scale, factor, shared.rows, warp_row, key, shared.scales, scores, &state, sums,
                weights);
    }
    CopyAsyncWait<0>();
    __syncthreads();  // the keys and scales have been used
    copies.Widen(shared.integers, shared.tile);
    __syncthreads();
    if (tile + 1 < range.tiles.end) {
      copies.StartKeys(shared.integers, tile + 1, blocks);
      copies.StartScales(&shared.scales, tile + 1, blocks);
    }
    CopyAsyncCommit();
    if (seen) {
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) {
        AddValues<kDim>(weights[step], shared.tile, step, 0, sums);
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
    TiledInt8Kernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tiles,
                    const float scale) {
  GridDependencyPass();
  auto& shared = *DynamicShared<SharedInt8Tiles<kDim>>();
  ForEachRun(a, tokens_per_tile, shared.rows, [&](int begin, int end) {
    TiledRun<kDim>(a, begin, end, blockIdx.y, blockIdx.z, split_tiles, scale, shared);
  });
}

}  // namespace

void LaunchTiledInt8(const AttentionLaunch& args, cudaStream_t stream) {
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() {
    // The shared memory limit of devices of compute capability 8.0.
    static_assert(sizeof(SharedInt8Tiles<kDim>) <= 163 << 10);
    LaunchTiles(TiledInt8Kernel<kDim>, kRows, kThreads, sizeof(SharedInt8Tiles<kDim>), args,
                stream);
  });
}

}  // namespace moeserve::cuda

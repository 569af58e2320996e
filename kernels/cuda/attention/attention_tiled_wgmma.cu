// The computation of attention_tiled_mma.cu by wgmma, for devices of compute capability 9.0. A
// block is one warpgroup, which computes 64 rows. Two blocks share a multiprocessor: on an H200
// they are faster than one block of two warpgroups, although these read keys and values half as
// often, because the products of one fall into the softmax of the other.
//
// The products run asynchronously: while the tensor cores multiply the weights of a tile by its
// values, the warpgroup computes the softmax of the next tile.
#include "kernels/cuda/attention/attention_wgmma.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 64;

template <int kDim>
struct SharedPlanes {
  alignas(1024) char keys[2][kTileKeys * kDim * 2];
  char values[2][kTileKeys * kDim * 2];
  char queries[kRows * kDim * 2];
  Stash<kDim, kThreads> stash;
  BlockRows<kRows> rows;
};

// Computes rows [chunk * kRows, (chunk + 1) * kRows) of tokens [begin, end), which belong to one
// sequence.
template <int kDim>
__device__ __forceinline__ void WgmmaRun(const AttentionLaunch& a, int begin, int end, int kv_head,
                                         int chunk, int split_tiles, float scale,
                                         SharedPlanes<kDim>& shared) {
  BlockKeys range;
  if (!FindWork<kTileKeys>(a, begin, end, -1, 0, kv_head, chunk, &shared.rows, &range)) return;
  const TileCopies<kDim, kThreads, true> copies(a.cache, kv_head, range);
  typename TileCopies<kDim, kThreads, true>::Blocks blocks, next_blocks;
  const int first_tile = range.tiles.begin;
  const int last_tile = range.tiles.end - 1;
  const auto copy_keys = [&](int tile, const auto& of_tile) {
    if (tile <= last_tile) copies.StartKeys(shared.keys[tile % 2], tile, of_tile);
  };
  copies.Find(first_tile, blocks);
  copy_keys(first_tile, blocks);
  CopyAsyncCommit();
  copies.StartValues(shared.values[first_tile % 2], first_tile, blocks);
  copies.Find(first_tile + 1, blocks);
  copies.Find(first_tile + 2, next_blocks);
  copy_keys(first_tile + 1, blocks);
  CopyAsyncCommit();
  LoadQueries<kDim, kRows, kThreads>(a, shared.rows, shared.queries);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const SeenByAll seen = SeenByAllOf(shared.rows, warp_row, a.seen);

  const ScoreFactor score = FactorOf(a, scale);
  RowState<kTileSteps> state;
  float sums[kDim / 2] = {};
  float scores[kTileKeys / 2];
  uint32_t weights[kTileSteps][4] = {};
  Merged<kDim> merged;
  const auto first_split = [&](int tile) { return tile / split_tiles == first_tile / split_tiles; };

  CopyAsyncWait<1>();
  FenceAsyncShared();
  __syncthreads();
  const uint32_t queries = RowsDescriptor(shared.queries);
  StartScores<kDim, kRows>(queries, RowsDescriptor(shared.keys[first_tile % 2]), scores);
  WgmmaWait<0>();
  WgmmaKeepInPlace(scores);
  Softmax(a, score, shared.rows, warp_row, seen, first_tile * kTileKeys, scores, &state);
  PackTile(scores, weights);
  // A tile that a row does not see has weights of 0 and does not change its sums (if the values are
  // finite), so all warps compute all tiles.
  int split_end = (first_tile / split_tiles + 1) * split_tiles;
  for (int tile = first_tile; tile < last_tile; ++tile) {
    CopyAsyncWait<0>();
    FenceAsyncShared();
    // Afterwards the values of this tile and the keys of the next one are visible, and no product
    // reads the buffers that the next copies overwrite.
    __syncthreads();
    copies.StartValues(shared.values[(tile + 1) % 2], tile + 1, blocks);
    copy_keys(tile + 2, next_blocks);
    CopyAsyncCommit();
#pragma unroll
    for (int i = 0; i < copies.kBlocks; ++i) blocks[i] = next_blocks[i];
    copies.Find(tile + 3, next_blocks);
    StartScores<kDim, kRows>(queries, RowsDescriptor(shared.keys[(tile + 1) % 2]), scores);
    StartValues<kDim>(weights, ValuesDescriptor(shared.values[tile % 2]), sums);
    const bool split_ends = tile + 1 == split_end;
    MergeFactors f[2];
    if (split_ends) {
      split_end += split_tiles;
      MergeTiledState(first_split(tile), score.factor, &state, &merged, &shared.stash, f);
    }
    WgmmaWait<1>();
    WgmmaKeepInPlace(scores);
    const Rescaling rescaling =
        Softmax(a, score, shared.rows, warp_row, seen, (tile + 1) * kTileKeys, scores, &state);
    ComputeBefore(state);
    FinishValues(weights, sums);
    if (split_ends) {
      MergeTiledValues(first_split(tile), f, AsFragments(sums), &merged, &shared.stash);
    } else {
      Rescale(rescaling, AsFragments(sums));
    }
    PackTile(scores, weights);
  }
  CopyAsyncWait<0>();
  FenceAsyncShared();
  __syncthreads();
  StartValues<kDim>(weights, ValuesDescriptor(shared.values[last_tile % 2]), sums);
  FinishValues(weights, sums);
  MergeFactors f[2];
  MergeTiledState(first_split(last_tile), score.factor, &state, &merged, &shared.stash, f);
  MergeTiledValues(first_split(last_tile), f, AsFragments(sums), &merged, &shared.stash);
  StoreFinished<kDim>(a, shared.rows, warp_row, merged, shared.stash);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim > 128 ? 1 : 2)
    WgmmaKernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tiles,
                const float scale) {
  if constexpr (MOESERVE_HAS_SM90A) {
    GridDependencyPass();
    auto& shared = *DynamicShared<SharedPlanes<kDim>>();
    ForEachRun(a, tokens_per_tile, shared.rows, [&](int begin, int end) {
      WgmmaRun<kDim>(a, begin, end, blockIdx.y, blockIdx.z, split_tiles, scale, shared);
    });
  } else {
    // The host selects the kernel by the device's capability, so this code does not run.
    __trap();
  }
}

template <int kDim>
void LaunchOf(const AttentionLaunch& args, cudaStream_t stream) {
  static_assert(sizeof(SharedPlanes<kDim>) <= 227 << 10);
  LaunchTiles(WgmmaKernel<kDim>, kRows, kThreads, sizeof(SharedPlanes<kDim>), args, stream);
}

}  // namespace

bool TiledWgmmaFits() {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  return major == 9;
}

void LaunchTiledWgmma(const AttentionLaunch& args, cudaStream_t stream) {
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() { LaunchOf<kDim>(args, stream); });
}

}  // namespace moeserve::cuda

// The computation of attention_tiled_mma.cu by wgmma, for devices of compute capability 9.0. A
// block is one warpgroup, which computes 64 rows. Two blocks share a multiprocessor: on an H200
// they are faster than one block of two warpgroups, although these read keys and values half as
// often, because the products of one fall into the softmax of the other.
//
// The products run asynchronously: while the tensor cores multiply the weights of a tile by its
// values, the warpgroup computes the softmax of the next tile. Rows have the bits of the other
// kernels, because each element is the same sequence of products: tensor cores add the products of
// wgmma and of mma.sync in the same order (tests/cuda/attention_test.cc).
#include "kernels/cuda/attention/attention_tiled.cuh"
#include "kernels/cuda/device/wgmma.cuh"

namespace moeserve::cuda {
namespace {

// Functions that are not templates are marked as possibly unused, because code for other devices
// has only an empty kernel.
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

// Views a thread's accumulators of wgmma as the fragments of mma.sync: both have the same layout.
template <int kColumns>
__device__ __forceinline__ float (&AsFragments(float (&d)[kColumns]))[kColumns / 4][4] {
  return reinterpret_cast<float(&)[kColumns / 4][4]>(d);
}

// Starts the product of the queries and a tile of keys.
template <int kDim>
__device__ __forceinline__ void StartScores(char* queries, char* keys,
                                            float (&scores)[kTileKeys / 2]) {
  WgmmaKeepInPlace(scores);
  WgmmaFence();
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    const int plane = d / 4;
    const uint64_t q = MatrixDescriptor(queries + plane * kRows * kPlaneRowBytes,
                                        Swizzle::k128Bytes, 8 * kPlaneRowBytes);
    const uint64_t k = MatrixDescriptor(keys + plane * kTileKeys * kPlaneRowBytes,
                                        Swizzle::k128Bytes, 8 * kPlaneRowBytes);
    Wgmma<kTileKeys>::Shared(scores, AdvanceDescriptor(q, d % 4 * 32),
                             AdvanceDescriptor(k, d % 4 * 32), d > 0);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(scores);
}

// Waits for all products. Until then, nothing may access the registers that they use.
template <int kColumns>
__device__ __forceinline__ void FinishValues(uint32_t (&weights)[kTileSteps][4],
                                             float (&sums)[kColumns]) {
  WgmmaWait<0>();
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(weights);
}

// Starts the product of the weights of a tile and its values.
template <int kDim>
__device__ __forceinline__ void StartValues(uint32_t (&weights)[kTileSteps][4], char* values,
                                            float (&sums)[kDim / 2]) {
  const uint64_t v = TransposedDescriptor(values, kTileKeys * kPlaneRowBytes);
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(weights);
  WgmmaFence();
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    Wgmma<kDim>::RegistersTransposed(sums, weights[step],
                                     AdvanceDescriptor(v, step * 16 * kPlaneRowBytes), true);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(sums);
}

// Keeps the compiler from moving the computation of the weights behind the wait that follows,
// during which the tensor cores would be idle: the branch depends on all weights. They are not
// negative, so the highest bit is never set and the kernel does not stop.
[[maybe_unused]] __device__ __forceinline__ void ComputeBefore(
    [[maybe_unused]] uint32_t (&weights)[kTileSteps][4]) {
#if !defined(MOESERVE_CUDA_EMULATION)
  uint32_t all = 0;
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) all |= weights[step][i];
  }
  if (all == 0xffffffffu) __trap();
#endif
}

// Turns the scores of the tile whose keys begin at `key` into weights and adds these to their sums.
// Returns how the weighted values so far must be rescaled.
[[maybe_unused]] __device__ __forceinline__ Rescaling Softmax(const AttentionLaunch& a,
                                                              const ScoreFactor& score,
                                                              const RowPair& pair, int key,
                                                              float (&scores)[kTileKeys / 2],
                                                              RowState<kTileSteps>* state,
                                                              uint32_t (&weights)[kTileSteps][4]) {
  auto& fragments = AsFragments(scores);
  float maximum[2] = {state->maximum[0], state->maximum[1]};
  MaskAndMaximum(a, score.scale, pair, key, fragments, maximum);
  const Rescaling rescaling = RaiseMaximum(maximum, score.factor, state);
  const float reference[2] = {Reference(maximum[0] * score.factor),
                              Reference(maximum[1] * score.factor)};
#pragma unroll
  for (int step = 0; step < kTileSteps; ++step) {
    Weights(fragments, step, score.factor, reference, state->sum[step], weights[step]);
  }
  return rescaling;
}

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
  const RowPair pair = RowPairOf(shared.rows, warp_row, a.seen);

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
  StartScores<kDim>(shared.queries, shared.keys[first_tile % 2], scores);
  WgmmaWait<0>();
  WgmmaKeepInPlace(scores);
  Softmax(a, score, pair, first_tile * kTileKeys, scores, &state, weights);
  // A tile that a row does not see has weights of 0 and does not change its sums (if the values are
  // finite), so all warps compute all tiles.
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
    StartScores<kDim>(shared.queries, shared.keys[(tile + 1) % 2], scores);
    StartValues<kDim>(weights, shared.values[tile % 2], sums);
    const bool split_ends = (tile + 1) % split_tiles == 0;
    MergeFactors f[2];
    if (split_ends) {
      MergeTiledState(first_split(tile), score.factor, &state, &merged, &shared.stash, f);
    }
    WgmmaWait<1>();
    WgmmaKeepInPlace(scores);
    uint32_t next_weights[kTileSteps][4];
    const Rescaling rescaling =
        Softmax(a, score, pair, (tile + 1) * kTileKeys, scores, &state, next_weights);
    ComputeBefore(next_weights);
    FinishValues(weights, sums);
    if (split_ends) {
      MergeTiledValues(first_split(tile), f, AsFragments(sums), &merged, &shared.stash);
    } else {
      Rescale(rescaling, AsFragments(sums));
    }
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[step][i] = next_weights[step][i];
    }
  }
  CopyAsyncWait<0>();
  FenceAsyncShared();
  __syncthreads();
  StartValues<kDim>(weights, shared.values[last_tile % 2], sums);
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
    ForEachRun(a, tokens_per_tile, [&](int begin, int end) {
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

// Attention of tiles of tokens by blocks of several warpgroups, for devices of compute
// capability 9.0 and heads of 64 or 128 columns. Rows have the bits of attention_tiled_wgmma.cu or,
// over an int8 cache, of int8/attention_tiled_int8.cu.
//
// A block has two consumer warpgroups (three for heads of 64 elements) of 64 rows each, and one
// producer warpgroup, which fills two rings, one with tiles of keys and one with tiles of values.
// All consumers read them. So keys and values are read half as often as by blocks of one warpgroup,
// and consumers execute no instructions for copies. What is particular to a type of cache is the
// producer, in the files that include this one.
//
// Consumers take turns to start their products, so that the tensor cores multiply for one consumer
// while the other one computes its softmax. As in attention_tiled_wgmma.cu, the products of a
// tile's weights and values also run during the softmax of the consumer's own next tile.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/attention_wgmma.cuh"
#include "kernels/cuda/attention/int8/int8_tiles.cuh"

namespace moeserve::cuda {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

template <int kDimArg, ScoreKind kKindArg, bool kInt8Arg>
struct PingPongShape {
  static constexpr int kDim = kDimArg;
  static constexpr ScoreKind kKind = kKindArg;
  static constexpr bool kInt8 = kInt8Arg;  // the cache
  // Three consumers have too few registers for other scores.
  static constexpr int kConsumers = kDim == 64 && kKind == ScoreKind::kPlain ? 3 : 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kStages = kDim == 128 ? 4 : kInt8 ? 8 : 6;
  static constexpr bool kCountsTiles = (kDim == 128 && kKind == ScoreKind::kOwn) || kInt8;
  static_assert(!kCountsTiles || (kStages & (kStages - 1)) == 0, "a power of two");
  static constexpr int kTileBytes = kTileKeys * kDim * 2;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // Named barriers. Consumer c waits for its turn at kTurnBarrier + c.
  static constexpr int kTurnBarrier = 1;
  static constexpr int kQueriesBarrier = kTurnBarrier + kConsumers;
  static_assert(kQueriesBarrier + kConsumers <= 16);
  // At first, every thread has the same number of registers, a multiple of 8.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * kRegisters);
};

template <typename S>
struct Ring {
  char tiles[S::kStages][S::kTileBytes];
};

// The barriers of a ring.
template <typename S>
struct RingBarriers {
  uint64_t full[S::kStages];
  uint64_t empty[S::kStages];
};

// What the producer of an int8 cache needs besides the rings.
template <typename S>
struct Int8Staging {
  static constexpr int kStages = 3;
  static constexpr int kPages = kTileKeys / kPageTokens;
  // A page of a tile, as the cache has it.
  struct Page {
    char keys[kCacheScaleBytes + kPageTokens * S::kDim];
    char values[kCacheScaleBytes + kPageTokens * S::kDim];
  };
  Page pages[kStages][kPages];
  uint64_t full[kStages][kPages];
  // The scales of the tiles in the rings, which are filled and released with the keys.
  TileScales scales[S::kStages];
};
struct NoStaging {};

template <typename S>
struct PingPongShared {
  alignas(1024) Ring<S> keys;
  Ring<S> values;
  char queries[S::kRows * S::kDim * 2];
  alignas(16) std::conditional_t<S::kInt8, Int8Staging<S>, NoStaging> staging;
  RingBarriers<S> of_keys;
  RingBarriers<S> of_values;
  BlockRows<S::kRows> rows;
};

// The stage of the rings that has a tile's keys and values, and the parity of its phase. It is
// counted or, with kCountsTiles, computed from the number of the tile, which takes one register
// less.
template <typename S>
class StageOfTile {
 public:
  __device__ __forceinline__ int stage() const {
    return S::kCountsTiles ? static_cast<int>(static_cast<uint32_t>(count_) % S::kStages) : count_;
  }
  __device__ __forceinline__ uint32_t parity() const {
    return S::kCountsTiles ? static_cast<uint32_t>(count_) / S::kStages % 2 : parity_;
  }
  __device__ __forceinline__ void Advance() {
    ++count_;
    if (!S::kCountsTiles && count_ == S::kStages) {
      count_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int count_ = 0;
  uint32_t parity_ = 0;
};

// Does what FindWork() does in the consumers, which find the rows. Returns false as FindWork().
template <int kRows>
__device__ __forceinline__ bool AwaitWork(const AttentionLaunch& a, int begin, int end,
                                          const BlockRows<kRows>& rows, BlockKeys* keys) {
  if (static_cast<int>(blockIdx.z) * kRows >= QueryHeadsOf(a, begin, end)) return false;
  __syncthreads();
  __syncthreads();
  const int sequence = a.step.sequence[begin];
  if (sequence < 0) return false;
  *keys = KeysOf<kTileKeys>(a, sequence, rows);
  return true;
}

// --- The consumers ------------------------------------------------------------------------------

// Returns the tiles with keys that a row of the consumer sees; none if it has no rows in use.
template <int kRows>
__device__ __forceinline__ TileRange TilesOfConsumer(const SeenKeys& seen,
                                                     const BlockRows<kRows>& rows, int consumer) {
  int first = INT32_MAX, last = -1;
#pragma unroll
  for (int i = 0; i < kWarpgroupRows / 32; ++i) {
    const int p =
        rows.position[consumer * kWarpgroupRows + i * 32 + static_cast<int>(threadIdx.x) % 32];
    if (p < 0) continue;
    first = min(first, FirstKey(seen, p));
    last = max(last, LastKey(seen, p, rows.length));
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    first = min(first, __shfl_xor_sync(kFullMask, first, other));
    last = max(last, __shfl_xor_sync(kFullMask, last, other));
  }
  if (last < 0) return {0, 0};
  const TileRange tiles = TilesOf<kTileKeys>(first, last);
  return {__shfl_sync(kFullMask, tiles.begin, 0), __shfl_sync(kFullMask, tiles.end, 0)};
}

// Returns `value`, such that the compiler does not compute what depends on it before a loop around
// the call: the registers that would keep it are those of the sums.
__device__ __forceinline__ int ComputedHere(int value) {
#if !defined(MOESERVE_CUDA_EMULATION)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// One consumer. All consumers take one turn for each of the block's tiles.
template <typename S>
class Consumer {
 public:
  static constexpr int kDim = S::kDim;

  __device__ __forceinline__ Consumer(const AttentionLaunch& a, int split_tiles, float scale,
                                      PingPongShared<S>& shared)
      : a_(a),
        shared_(shared),
        split_tiles_(split_tiles),
        score_(FactorOf<S::kKind>(a, scale)),
        index_(__shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0)) {}

  __device__ __forceinline__ void Run(int tokens_per_tile) {
    if (index_ == S::kConsumers - 1) PassTurn();
    ForEachRun(a_, tokens_per_tile, shared_.rows, [&](int begin, int end) {
      BlockKeys range;
      if (!FindWork<kTileKeys>(a_, begin, end, -1, 0, blockIdx.y, blockIdx.z, &shared_.rows, &range,
                               S::kConsumerThreads)) {
        return;
      }
      const int row = index_ * kWarpgroupRows;
      LoadQueries<kDim, S::kRows, kWarpgroupThreads, kWarpgroupRows>(
          a_, shared_.rows, shared_.queries, static_cast<int>(threadIdx.x) % kWarpgroupThreads,
          row);
      FenceAsyncShared();
      NamedBarrierSync(S::kQueriesBarrier + index_, kWarpgroupThreads);
      const TileRange own = TilesOfConsumer(a_.seen, shared_.rows, index_);
      const TileRange all = TilesOfBlock();
      const bool none = own.end == own.begin;
      Skip((none ? all.end : own.begin) - all.begin);
      if (none) return;
      const int last = Compute(own.begin, own.end - 1, row);
      Skip(TilesOfBlock().end - 1 - last);
    });
    if (index_ == 0) TakeTurn();
  }

 private:
  __device__ __forceinline__ void TakeTurn() {
    NamedBarrierSync(S::kTurnBarrier + index_, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void PassTurn() {
    const int next = index_ == S::kConsumers - 1 ? 0 : index_ + 1;
    NamedBarrierArrive(S::kTurnBarrier + next, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void Await(RingBarriers<S>& ring, const StageOfTile<S>& at) {
    MbarrierWait(ring.full + at.stage(), at.parity());
  }
  // Every lane has waited for the stage and does not access it any more.
  __device__ __forceinline__ void Release(RingBarriers<S>& ring, const StageOfTile<S>& at) {
    if (threadIdx.x % 32 == 0) MbarrierArrive(ring.empty + at.stage());
  }

  __device__ __forceinline__ uint32_t KeysAt(int stage) const {
    return SameInAllLanes(RowsDescriptor(shared_.keys.tiles[stage]));
  }
  __device__ __forceinline__ uint32_t ValuesAt(int stage) const {
    return SameInAllLanes(ValuesDescriptor(shared_.values.tiles[stage]));
  }

  // Returns the block's tiles. They are read where they are needed, because no register is left to
  // keep them.
  __device__ __forceinline__ TileRange TilesOfBlock() const {
    const volatile BlockRows<S::kRows>& rows = shared_.rows;
    return TilesOf<kTileKeys>(rows.first_key, rows.last_key);
  }

  // Releases the next tiles, of which the consumer's rows see no key.
  __device__ __forceinline__ void Skip(int tiles) {
    for (; tiles > 0; --tiles) {
      TakeTurn();
      PassTurn();
      Await(shared_.of_keys, at_);
      Await(shared_.of_values, at_);
      __syncwarp();
      Release(shared_.of_keys, at_);
      Release(shared_.of_values, at_);
      at_.Advance();
    }
  }

  // Replaces the products of the tile at at_, whose keys begin at `key`, by weights as Softmax()
  // does, and releases the keys. Over an int8 cache, weights are multiplied by the scales of
  // values.
  __device__ __forceinline__ Rescaling Weights(int warp_row, const SeenByAll& seen, int key,
                                               float (&scores)[kTileKeys / 2],
                                               RowState<kTileSteps>* state) {
    if constexpr (S::kInt8) {
      const TileScales& scales = shared_.staging.scales[at_.stage()];
      ScaleKeys(scales.keys, 0, AsFragments(scores));
      const Rescaling rescaling =
          Softmax<S::kKind>(a_, score_, shared_.rows, warp_row, seen, key, scores, state);
      ScaleKeys(scales.values, 0, AsFragments(scores));
      __syncwarp();
      Release(shared_.of_keys, at_);
      return rescaling;
    } else {
      Release(shared_.of_keys, at_);
      return Softmax<S::kKind>(a_, score_, shared_.rows, warp_row, seen, key, scores, state);
    }
  }

  // Computes and stores the rows from `consumer_row` on, whose keys are in these tiles. A tile that
  // a row does not see has weights of 0 and does not change its sums. Returns last_tile.
  __device__ __forceinline__ int Compute(int first_tile, int last_tile, int consumer_row);

  const AttentionLaunch& a_;
  PingPongShared<S>& shared_;
  const int split_tiles_;
  const ScoreFactor score_;
  const int index_;
  StageOfTile<S> at_;
};

template <typename S>
__device__ __forceinline__ int Consumer<S>::Compute(int first_tile, int last_tile,
                                                    int consumer_row) {
  const auto warp_row = [&] {
    return consumer_row + ComputedHere(static_cast<int>(threadIdx.x)) % kWarpgroupThreads / 32 * 16;
  };
  const SeenByAll seen = SeenByAllOf(shared_.rows, warp_row(), a_.seen);
  RowState<kTileSteps> state;
  float sums[kDim / 2] = {};
  float scores[kTileKeys / 2];
  uint32_t weights[kTileSteps][4] = {};
  Merged<kDim> merged;
  NoStash none;

  const uint32_t queries = RowsDescriptor(shared_.queries + consumer_row * kPlaneRowBytes);
  Await(shared_.of_keys, at_);
  TakeTurn();
  StartScores<kDim, S::kRows>(SameInAllLanes(queries), KeysAt(at_.stage()), scores);
  PassTurn();
  WgmmaWait<0>();
  WgmmaKeepInPlace(scores);
  Weights(warp_row(), seen, first_tile * kTileKeys, scores, &state);
  PackTile(scores, weights);
  int tile = first_tile;
  for (; tile < last_tile; ++tile) {
    const StageOfTile<S> of_values = at_;
    at_.Advance();
    Await(shared_.of_keys, at_);
    Await(shared_.of_values, of_values);
    TakeTurn();
    StartScores<kDim, S::kRows>(SameInAllLanes(queries), KeysAt(at_.stage()), scores);
    StartValues<kDim>(weights, ValuesAt(of_values.stage()), sums);
    PassTurn();
    // A power of two.
    const bool split_ends = ((tile + 1) & (split_tiles_ - 1)) == 0;
    MergeFactors f[2];
    if (split_ends) {
      MergeTiledState(false, score_.factor, &state, &merged, &none, f);
    }
    WgmmaWait<1>();
    WgmmaKeepInPlace(scores);
    const Rescaling rescaling = Weights(warp_row(), seen, (tile + 1) * kTileKeys, scores, &state);
    ComputeBefore(state);
    FinishValues(weights, sums);
    Release(shared_.of_values, of_values);
    if (split_ends) {
      MergeTiledValues(false, f, AsFragments(sums), &merged, &none);
    } else {
      Rescale(rescaling, AsFragments(sums));
    }
    PackTile(scores, weights);
  }
  Await(shared_.of_values, at_);
  StartValues<kDim>(weights, ValuesAt(at_.stage()), sums);
  FinishValues(weights, sums);
  Release(shared_.of_values, at_);
  at_.Advance();
  MergeFactors f[2];
  MergeTiledState(false, score_.factor, &state, &merged, &none, f);
  MergeTiledValues(false, f, AsFragments(sums), &merged, &none);
  StoreFinished<kDim>(a_, shared_.rows, warp_row(), merged, none);
  return tile;
}

// Producer::Run(a, tokens_per_tile, shared) fills the rings, by the last warpgroup of the block.
// The barrier of a full stage counts Producer::kArrivals arrivals.
template <typename S, typename Producer>
__global__ void __launch_bounds__(S::kThreads, 1)
    PingPongKernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tiles,
                   const float scale) {
  if constexpr (MOESERVE_HAS_SM90A) {
    auto& shared = *DynamicShared<PingPongShared<S>>();
    if (threadIdx.x == 0) {
      for (RingBarriers<S>* ring : {&shared.of_keys, &shared.of_values}) {
        for (int s = 0; s < S::kStages; ++s) {
          MbarrierInit(ring->full + s, Producer::kArrivals);
          MbarrierInit(ring->empty + s, S::kConsumerThreads / 32);
        }
      }
      Producer::InitBarriers(shared);
      MbarrierInitFence();
    }
    GridDependencyPass();
    __syncthreads();
    if (__shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0) ==
        S::kConsumers) {
      DecreaseRegisters<S::kProducerRegisters>();
      Producer::Run(a, tokens_per_tile, shared);
    } else {
      IncreaseRegisters<S::kConsumerRegisters>();
      Consumer<S>(a, split_tiles, scale, shared).Run(tokens_per_tile);
    }
  } else {
    // The host selects the kernel by the device's capability, so this code does not run.
    __trap();
  }
}

template <int kDim, ScoreKind kKind, bool kInt8, template <typename> typename Producer>
void LaunchPingPongKernel(const AttentionLaunch& args, cudaStream_t stream) {
  using S = PingPongShape<kDim, kKind, kInt8>;
  static_assert(sizeof(PingPongShared<S>) <= 227 << 10);
  LaunchTiles(PingPongKernel<S, Producer<S>>, S::kRows, S::kThreads, sizeof(PingPongShared<S>),
              args, stream);
}

template <int kDim, bool kInt8, template <typename> typename Producer>
void LaunchPingPongOfDim(const AttentionLaunch& args, cudaStream_t stream) {
  if (OwnScores(args, args.scale * kLog2E)) {
    LaunchPingPongKernel<kDim, ScoreKind::kOwn, kInt8, Producer>(args, stream);
  } else {
    LaunchPingPongKernel<kDim, ScoreKind::kPlain, kInt8, Producer>(args, stream);
  }
}

// Launches the kernels with this producer, for a cache with padded_dim 64 or 128.
template <bool kInt8, template <typename> typename Producer>
void LaunchPingPongWith(const AttentionLaunch& args, cudaStream_t stream) {
  if (args.cache.padded_dim == 64) {
    LaunchPingPongOfDim<64, kInt8, Producer>(args, stream);
  } else {
    LaunchPingPongOfDim<128, kInt8, Producer>(args, stream);
  }
}

}  // namespace moeserve::cuda

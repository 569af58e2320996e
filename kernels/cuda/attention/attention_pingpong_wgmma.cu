// The computation of attention_tiled_wgmma.cu by blocks of several warpgroups, for devices of
// compute capability 9.0 and caches with planes of 64 or 128 columns. Rows have the same bits.
//
// A block has two consumer warpgroups (three for heads of 64 elements) of 64 rows each, and one
// producer warpgroup. One producer warp copies keys and one copies values, unchanged by bulk
// copies, into two rings of tiles, which all consumers read. So keys and values are read half as
// often as by blocks of one warpgroup, and consumers execute no instructions for copies.
//
// Consumers take turns to start their products, so that the tensor cores multiply for one consumer
// while the other one computes its softmax. As in attention_tiled_wgmma.cu, the products of a
// tile's weights and values also run during the softmax of the consumer's own next tile.
#include "kernels/cuda/attention/attention_wgmma.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;

template <int kDimArg, ScoreKind kKindArg>
struct PingPongShape {
  static constexpr int kDim = kDimArg;
  static constexpr ScoreKind kKind = kKindArg;
  // Three consumers have too few registers for other scores.
  static constexpr int kConsumers = kDim == 64 && kKind == ScoreKind::kPlain ? 3 : 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kStages = kDim == 64 ? 6 : 4;
  static constexpr bool kCountsTiles = kDim == 128 && kKind == ScoreKind::kOwn;
  static_assert(!kCountsTiles || kStages == 4, "a power of two");
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

template <typename S>
struct PingPongShared {
  alignas(1024) Ring<S> keys;
  Ring<S> values;
  char queries[S::kRows * S::kDim * 2];
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

// --- The producer -------------------------------------------------------------------------------

// Sets the values of a tile's keys outside of [begin, end), relative to the tile, to zero: their
// weights are zero, but what the buffer contains may be no number.
template <typename S>
__device__ void ClearUnread(char* tile, int begin, int end) {
  constexpr int kPieces = kPlaneRowBytes / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int unread = kTileKeys - (end - begin);
  for (int i = lane; i < unread * (S::kTileBytes / kTileKeys / 16); i += 32) {
    const int n = i / kPieces % unread;
    const int row = n < begin ? n : n - begin + end;
    const int plane = i / kPieces / unread;
    *reinterpret_cast<uint4*>(tile + (plane * kTileKeys + row) * kPlaneRowBytes +
                              i % kPieces * 16) = make_uint4(0, 0, 0, 0);
  }
  FenceAsyncShared();
}

// Copies all tiles of keys or of values into their ring, by one warp. Only rows of keys in `range`
// are copied: the others may never have been written. Those of values become zeros.
template <typename S, bool kValues>
__device__ __forceinline__ void CopyTiles(const KvLayerView& cache, const BlockKeys& range,
                                          int kv_head, Ring<S>& ring, RingBarriers<S>& barriers,
                                          StageOfTile<S>& at) {
  constexpr int kPlanes = S::kDim / kPlaneColumns;
  constexpr int kCopies = kTileKeys / kPageTokens * kPlanes;
  static_assert(kCopies <= 32);
  // Each of the first lanes copies a plane of one of the tile's blocks.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int plane = lane % kPlanes;
  const int first_key = lane / kPlanes * kPageTokens;  // in the tile
  const char* const from = static_cast<const char*>(kValues ? cache.values : cache.keys) +
                           kv_head * cache.head_stride * 2 + plane * kPlaneBlockBytes;
  const auto block_bytes = static_cast<uint32_t>(cache.block_stride * 2);
  const auto block_of = [&](int tile) {
    const int key = tile * kTileKeys + first_key;
    const bool read = lane < kCopies && key <= range.last && key + kPageTokens > range.first;
    return read ? range.page_table[key / kPageTokens] : -1;
  };
  int32_t block = block_of(range.tiles.begin);
  for (int tile = range.tiles.begin; tile < range.tiles.end; ++tile) {
    const int32_t next = block_of(tile + 1);
    const int begin = max(range.first - tile * kTileKeys, 0);
    const int end = min(range.last + 1 - tile * kTileKeys, kTileKeys);
    char* const to = ring.tiles[at.stage()];
    uint64_t* const full = barriers.full + at.stage();
    MbarrierWait(barriers.empty + at.stage(), at.parity() ^ 1);
    if (kValues && end - begin < kTileKeys) {
      ClearUnread<S>(to, begin, end);
      __syncwarp();
    }
    if (lane == 0) MbarrierArriveExpect(full, (end - begin) * S::kDim * 2);
    __syncwarp();
    if (block >= 0) {
      const int row = max(begin - first_key, 0);
      const int rows = min(end - first_key, kPageTokens) - row;
      CopyBulkAsync(to + (plane * kTileKeys + first_key + row) * kPlaneRowBytes,
                    from + static_cast<uint64_t>(static_cast<uint32_t>(block)) * block_bytes +
                        row * kPlaneRowBytes,
                    rows * kPlaneRowBytes, full);
    }
    block = next;
    at.Advance();
  }
}

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

template <typename S>
__device__ __forceinline__ void Produce(const AttentionLaunch& a, int tokens_per_tile,
                                        PingPongShared<S>& shared) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int warp =
      __shfl_sync(kFullMask, (static_cast<int>(threadIdx.x) - S::kConsumerThreads) / 32, 0);
  StageOfTile<S> at;
  ForEachRun(a, tokens_per_tile, [&](int begin, int end) {
    BlockKeys range;
    if (!AwaitWork(a, begin, end, shared.rows, &range)) return;
    if (warp == 0) {
      CopyTiles<S, false>(a.cache, range, kv_head, shared.keys, shared.of_keys, at);
    } else if (warp == 1) {
      CopyTiles<S, true>(a.cache, range, kv_head, shared.values, shared.of_values, at);
    }
  });
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
    ForEachRun(a_, tokens_per_tile, [&](int begin, int end) {
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
      if (own.end == own.begin) return Skip(range.tiles.end - range.tiles.begin);
      Skip(own.begin - range.tiles.begin);
      Compute(own.begin, own.end - 1, row);
      Skip(shared_.rows.last_key / kTileKeys + 1 - own.end);
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
  __device__ __forceinline__ void Release(RingBarriers<S>& ring, const StageOfTile<S>& at) {
    if (threadIdx.x % 32 == 0) MbarrierArrive(ring.empty + at.stage());
  }

  __device__ __forceinline__ uint32_t KeysAt(int stage) const {
    return SameInAllLanes(RowsDescriptor(shared_.keys.tiles[stage]));
  }
  __device__ __forceinline__ uint32_t ValuesAt(int stage) const {
    return SameInAllLanes(ValuesDescriptor(shared_.values.tiles[stage]));
  }

  // Releases the next tiles, of which the consumer's rows see no key.
  __device__ __forceinline__ void Skip(int tiles) {
    for (; tiles > 0; --tiles) {
      TakeTurn();
      PassTurn();
      Await(shared_.of_keys, at_);
      Release(shared_.of_keys, at_);
      Await(shared_.of_values, at_);
      Release(shared_.of_values, at_);
      at_.Advance();
    }
  }

  // Computes and stores the rows from `consumer_row` on, whose keys are in these tiles. A tile that
  // a row does not see has weights of 0 and does not change its sums.
  __device__ __forceinline__ void Compute(int first_tile, int last_tile, int consumer_row);

  const AttentionLaunch& a_;
  PingPongShared<S>& shared_;
  const int split_tiles_;
  const ScoreFactor score_;
  const int index_;
  StageOfTile<S> at_;
};

template <typename S>
__device__ __forceinline__ void Consumer<S>::Compute(int first_tile, int last_tile,
                                                     int consumer_row) {
  const int warp_row = consumer_row + static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16;
  const SeenByAll seen = SeenByAllOf(shared_.rows, warp_row, a_.seen);
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
  Release(shared_.of_keys, at_);
  Softmax<S::kKind>(a_, score_, shared_.rows, warp_row, seen, first_tile * kTileKeys, scores,
                    &state);
  PackTile(scores, weights);
  int split_end = (first_tile / split_tiles_ + 1) * split_tiles_;
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const StageOfTile<S> of_values = at_;
    at_.Advance();
    Await(shared_.of_keys, at_);
    Await(shared_.of_values, of_values);
    TakeTurn();
    StartScores<kDim, S::kRows>(SameInAllLanes(queries), KeysAt(at_.stage()), scores);
    StartValues<kDim>(weights, ValuesAt(of_values.stage()), sums);
    PassTurn();
    const bool split_ends = tile + 1 == split_end;
    MergeFactors f[2];
    if (split_ends) {
      split_end += split_tiles_;
      MergeTiledState(false, score_.factor, &state, &merged, &none, f);
    }
    WgmmaWait<1>();
    WgmmaKeepInPlace(scores);
    Release(shared_.of_keys, at_);
    const Rescaling rescaling = Softmax<S::kKind>(a_, score_, shared_.rows, warp_row, seen,
                                                  (tile + 1) * kTileKeys, scores, &state);
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
  StoreFinished<kDim>(a_, shared_.rows, warp_row, merged, none);
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    PingPongKernel(const AttentionLaunch a, const int tokens_per_tile, const int split_tiles,
                   const float scale) {
  if constexpr (MOESERVE_HAS_SM90A) {
    auto& shared = *DynamicShared<PingPongShared<S>>();
    if (threadIdx.x == 0) {
      for (RingBarriers<S>* ring : {&shared.of_keys, &shared.of_values}) {
        for (int s = 0; s < S::kStages; ++s) {
          MbarrierInit(ring->full + s, 1);
          MbarrierInit(ring->empty + s, S::kConsumerThreads / 32);
        }
      }
      MbarrierInitFence();
    }
    GridDependencyPass();
    __syncthreads();
    if (__shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0) ==
        S::kConsumers) {
      DecreaseRegisters<S::kProducerRegisters>();
      Produce<S>(a, tokens_per_tile, shared);
    } else {
      IncreaseRegisters<S::kConsumerRegisters>();
      Consumer<S>(a, split_tiles, scale, shared).Run(tokens_per_tile);
    }
  } else {
    // The host selects the kernel by the device's capability, so this code does not run.
    __trap();
  }
}

template <int kDim, ScoreKind kKind>
void LaunchPingPongOf(const AttentionLaunch& args, cudaStream_t stream) {
  using S = PingPongShape<kDim, kKind>;
  static_assert(sizeof(PingPongShared<S>) <= 227 << 10);
  LaunchTiles(PingPongKernel<S>, S::kRows, S::kThreads, sizeof(PingPongShared<S>), args, stream);
}

template <int kDim>
void LaunchPingPongOf(const AttentionLaunch& args, cudaStream_t stream) {
  if (OwnScores(args, args.scale * kLog2E)) {
    LaunchPingPongOf<kDim, ScoreKind::kOwn>(args, stream);
  } else {
    LaunchPingPongOf<kDim, ScoreKind::kPlain>(args, stream);
  }
}

}  // namespace

bool PingPongFits(const KvLayerView& cache) {
  return TiledWgmmaFits() && cache.in_planes() && cache.padded_dim <= 128;
}

void LaunchPingPong(const AttentionLaunch& args, cudaStream_t stream) {
  if (args.cache.padded_dim == 64) {
    LaunchPingPongOf<64>(args, stream);
  } else {
    LaunchPingPongOf<128>(args, stream);
  }
}

}  // namespace moeserve::cuda

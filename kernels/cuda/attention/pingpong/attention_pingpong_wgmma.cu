// The producer of attention_pingpong.cuh for bf16 caches whose rows are planes: one warp copies
// keys and one copies values, unchanged by bulk copies.
#include "kernels/cuda/attention/pingpong/attention_pingpong.cuh"

namespace moeserve::cuda {
namespace {

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

template <typename S>
struct PlanesProducer {
  static constexpr int kArrivals = 1;

  static __device__ __forceinline__ void InitBarriers(PingPongShared<S>&) {}

  static __device__ __forceinline__ void Run(const AttentionLaunch& a, int tokens_per_tile,
                                             PingPongShared<S>& shared) {
    const int kv_head = static_cast<int>(blockIdx.y);
    const int warp =
        __shfl_sync(kFullMask, (static_cast<int>(threadIdx.x) - S::kConsumerThreads) / 32, 0);
    StageOfTile<S> at;
    ForEachRun(a, tokens_per_tile, shared.rows, [&](int begin, int end) {
      BlockKeys range;
      if (!AwaitWork(a, begin, end, shared.rows, &range)) return;
      if (warp == 0) {
        CopyTiles<S, false>(a.cache, range, kv_head, shared.keys, shared.of_keys, at);
      } else if (warp == 1) {
        CopyTiles<S, true>(a.cache, range, kv_head, shared.values, shared.of_values, at);
      }
    });
  }
};

}  // namespace

bool PingPongFits(const KvLayerView& cache) {
  const bool fits =
      cache.type == KvCacheType::kInt8 ? cache.padded_dim % 64 == 0 : cache.in_planes();
  return TiledWgmmaFits() && fits && cache.padded_dim <= 128;
}

void LaunchPingPong(const AttentionLaunch& args, cudaStream_t stream) {
  LaunchPingPongWith<false, PlanesProducer>(args, stream);
}

}  // namespace moeserve::cuda

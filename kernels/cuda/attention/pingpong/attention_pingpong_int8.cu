// The producer of attention_pingpong.cuh for int8 caches. Each of its four warps copies one of the
// four pages of every tile as the cache has it, integers and scales, and widens it to bf16 into the
// rings. Pages of a warp are copied while it widens the pages before.
//
// A page is copied as a whole. The scales of keys that no row sees become 0, so what the cache has
// for them does not matter: integers are always finite. Pages without keys that a row sees are not
// copied; the rings have zeros for them.
#include "kernels/cuda/attention/pingpong/attention_pingpong.cuh"

namespace moeserve::cuda {
namespace {

template <typename S>
class Int8Producer {
  using Staging = Int8Staging<S>;
  static constexpr int kRowChunks = S::kDim / 16;  // of 16 integers

 public:
  static constexpr int kArrivals = Staging::kPages;  // warps
  static_assert(kArrivals == kWarpgroupThreads / 32);

  static __device__ __forceinline__ void InitBarriers(PingPongShared<S>& shared) {
    for (int s = 0; s < Staging::kStages; ++s) {
      for (int w = 0; w < kArrivals; ++w) MbarrierInit(&shared.staging.full[s][w], 1);
    }
  }

  static __device__ __forceinline__ void Run(const AttentionLaunch& a, int tokens_per_tile,
                                             PingPongShared<S>& shared) {
    Int8Producer producer(a.cache, shared);
    ForEachRun(a, tokens_per_tile, shared.rows, [&](int begin, int end) {
      BlockKeys range;
      if (AwaitWork(a, begin, end, shared.rows, &range)) producer.FillTiles(range);
    });
  }

 private:
  __device__ __forceinline__ Int8Producer(const KvLayerView& cache, PingPongShared<S>& shared)
      : cache_(cache),
        shared_(shared),
        page_(__shfl_sync(kFullMask, (static_cast<int>(threadIdx.x) - S::kConsumerThreads) / 32,
                          0)) {}

  // A tile's first key in the warp's page, and whether the page has a key that a row sees.
  __device__ __forceinline__ int FirstKeyOf(int tile) const {
    return tile * kTileKeys + page_ * kPageTokens;
  }
  static __device__ __forceinline__ bool IsRead(const BlockKeys& range, int first_key) {
    return first_key <= range.last && first_key + kPageTokens > range.first;
  }

  // Starts the copies of the warp's page of a tile, if it is read.
  __device__ __forceinline__ void Start(const BlockKeys& range, int tile) {
    const int key = FirstKeyOf(tile);
    if (!IsRead(range, key)) return;
    if (threadIdx.x % 32 == 0) {
      constexpr int kBytes = kCacheScaleBytes + kPageTokens * S::kDim;
      const int64_t at = range.page_table[key / kPageTokens] * cache_.block_stride +
                         static_cast<int>(blockIdx.y) * cache_.head_stride;
      auto& to = shared_.staging.pages[started_.stage][page_];
      uint64_t* const full = &shared_.staging.full[started_.stage][page_];
      MbarrierArriveExpect(full, 2 * kBytes);
      CopyBulkAsync(to.keys, static_cast<const char*>(cache_.keys) + at, kBytes, full);
      CopyBulkAsync(to.values, static_cast<const char*>(cache_.values) + at, kBytes, full);
    }
    started_.Advance();
  }

  // Fills the warp's part of all tiles.
  __device__ __forceinline__ void FillTiles(const BlockKeys& range) {
    constexpr int kAhead = Staging::kStages - 1;
    for (int i = 0; i < kAhead; ++i) {
      if (range.tiles.begin + i < range.tiles.end) Start(range, range.tiles.begin + i);
    }
    for (int tile = range.tiles.begin; tile < range.tiles.end; ++tile) {
      if (tile + kAhead < range.tiles.end) Start(range, tile + kAhead);
      const bool read = IsRead(range, FirstKeyOf(tile));
      auto& page = shared_.staging.pages[widened_.stage][page_];
      if (read) MbarrierWait(&shared_.staging.full[widened_.stage][page_], widened_.parity);
      MbarrierWait(shared_.of_keys.empty + at_.stage(), at_.parity() ^ 1);
      StoreScales(range, tile, page);
      Fill(page.keys, read, shared_.keys, shared_.of_keys);
      MbarrierWait(shared_.of_values.empty + at_.stage(), at_.parity() ^ 1);
      Fill(page.values, read, shared_.values, shared_.of_values);
      if (read) widened_.Advance();
      at_.Advance();
    }
  }

  // Each lane stores the scale of a key or of a value.
  __device__ __forceinline__ void StoreScales(const BlockKeys& range, int tile,
                                              const typename Staging::Page& page) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % kPageTokens;
    const int key = FirstKeyOf(tile) + row;
    const bool of_keys = lane < kPageTokens;
    float scale = 0.0f;
    if (key >= range.first && key <= range.last) {
      scale = reinterpret_cast<const float*>(of_keys ? page.keys : page.values)[row];
    }
    TileScales& to = shared_.staging.scales[at_.stage()];
    (of_keys ? to.keys : to.values)[page_ * kPageTokens + row] = scale;
  }

  // Widens the warp's keys or values to the present stage of their ring, and announces them.
  __device__ __forceinline__ void Fill(const char* page, bool read, Ring<S>& ring,
                                       RingBarriers<S>& barriers) {
    constexpr int kRowsAtOnce = 32 / kRowChunks;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = lane / kRowChunks, chunk = lane % kRowChunks;
    const char* const from = page + kCacheScaleBytes + lane * 16;
    // Of the two chunks of bf16 that each lane stores, lanes of one plane start with the first and
    // lanes of the other one with the second, so that they are in different banks.
    const int half = chunk / 4 % 2;
    const int shift = half * 8;
    char* const to = ring.tiles[at_.stage()] + page_ * kPageTokens * kPlaneRowBytes;
#pragma unroll
    for (int i = 0; i < kPageTokens / kRowsAtOnce; ++i) {
      uint4 four = make_uint4(0, 0, 0, 0);
      if (read) four = *reinterpret_cast<const uint4*>(from + i * kRowsAtOnce * S::kDim);
      const int row = first + i * kRowsAtOnce;
      Store(to, row, 2 * chunk + half, four, shift);
      Store(to, row, 2 * chunk + 1 - half, four, 8 - shift);
    }
    // Also before the page is overwritten by further copies.
    FenceAsyncShared();
    __syncwarp();
    if (lane == 0) MbarrierArrive(barriers.full + at_.stage());
  }

  // Stores the even bytes or, with a shift of 8 bits, the odd ones.
  static __device__ __forceinline__ void Store(char* to, int row, int chunk, const uint4& four,
                                               int shift) {
    *reinterpret_cast<uint4*>(PlaneAddress<kTileKeys>(to, row, chunk)) =
        make_uint4(Bf16FromEvenBytes(four.x >> shift), Bf16FromEvenBytes(four.y >> shift),
                   Bf16FromEvenBytes(four.z >> shift), Bf16FromEvenBytes(four.w >> shift));
  }

  // A stage of the staged pages, and the parity of its phase.
  struct StageOfPage {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void Advance() {
      if (++stage < Staging::kStages) return;
      stage = 0;
      parity ^= 1;
    }
  };

  const KvLayerView& cache_;
  PingPongShared<S>& shared_;
  const int page_;  // of a tile
  StageOfPage started_, widened_;
  StageOfTile<S> at_;
};

}  // namespace

void LaunchPingPongInt8(const AttentionLaunch& args, cudaStream_t stream) {
  LaunchPingPongWith<true, Int8Producer>(args, stream);
}

}  // namespace moeserve::cuda

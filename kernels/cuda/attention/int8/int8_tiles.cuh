// Tiles of an int8 cache in shared memory. Integers of 8 bits are exact in bf16, so the tensor
// cores multiply them as such. The products of a key are multiplied by the key's scale before
// anything else is done with them, and the softmax weight of a key by the value's scale before it
// is rounded to bf16. The sums of weights are without that scale.
#pragma once

#include "kernels/cuda/attention/attention_mma.cuh"

namespace moeserve::cuda {

// Keys and values are in shared memory in planes of 128 columns. Of narrower heads, the 16-byte
// chunks behind the last column are not used.
template <int kDim>
constexpr int kInt8TileBytes = (kDim < kPlaneRowBytes ? kPlaneRowBytes : kDim) * kTileKeys;

// The scales of a tile's keys and values. Those of keys that the rows do not read are 0.
struct TileScales {
  float keys[kTileKeys];
  float values[kTileKeys];
};

// Starts the copies of tiles of an int8 cache into shared memory, for all threads of a block
// together, as TileCopies does for a bf16 cache. Key k's 16-byte chunk c is stored at
// PlaneAddress<kTileKeys>(to, k, c).
template <int kDim, int kThreads>
class Int8TileCopies {
  static constexpr int kChunks = kInt8TileBytes<kDim> / kTileKeys / 16;
  static constexpr int kUsedChunks = kDim / 16;
  static constexpr int kRowsAtOnce = kThreads / kChunks;
  static constexpr int kCopies = kTileKeys / kRowsAtOnce;
  static_assert(kRowsAtOnce == 8 || kRowsAtOnce == kPageTokens);

 public:
  struct Blocks {
    int32_t of_rows[kTileKeys / kPageTokens];
    int32_t of_scale;  // that this thread copies
  };

  __device__ __forceinline__ Int8TileCopies(const KvLayerView& cache, int kv_head,
                                            const BlockKeys& keys)
      : table_(keys.page_table),
        first_(keys.first),
        span_(static_cast<uint32_t>(keys.last - keys.first)),
        row_(static_cast<int>(threadIdx.x) / kChunks),
        chunk_(static_cast<int>(threadIdx.x) % kChunks),
        block_bytes_(static_cast<uint32_t>(cache.block_stride)),
        row_bytes_(cache.padded_dim) {
    const bool stored = chunk_ < cache.padded_dim / 16;
    bytes_ = stored ? 16 : 0;
    const int64_t head = kv_head * cache.head_stride;
    const int64_t own = head + (stored ? cache.ByteOf(row_, chunk_ * 16) : 0);
    keys_ = static_cast<const char*>(cache.keys) + own;
    values_ = static_cast<const char*>(cache.values) + own;
    static_assert(kThreads == 2 * kTileKeys, "a thread copies the scale of a key or a value");
    const bool of_keys = static_cast<int>(threadIdx.x) < kTileKeys;
    scales_ = static_cast<const char*>(of_keys ? cache.keys : cache.values) + head +
              threadIdx.x % kPageTokens * sizeof(float);
  }

  // As those of TileCopies.
  __device__ __forceinline__ void Find(int tile, Blocks& blocks) const {
    FindBlocks(table_, first_, span_, tile, blocks.of_rows);
    const int key = tile * kTileKeys + static_cast<int>(threadIdx.x) % kTileKeys;
    blocks.of_scale = IsRead(key) ? table_[key / kPageTokens] : 0;
  }
  __device__ __forceinline__ void StartKeys(char* to, int tile, const Blocks& blocks) const {
    Start(to, keys_, tile, blocks);
  }
  __device__ __forceinline__ void StartValues(char* to, int tile, const Blocks& blocks) const {
    Start(to, values_, tile, blocks);
  }
  __device__ __forceinline__ void StartScales(TileScales* to, int tile,
                                              const Blocks& blocks) const {
    const int key = tile * kTileKeys + static_cast<int>(threadIdx.x) % kTileKeys;
    const auto id = static_cast<uint32_t>(blocks.of_scale);
    CopyAsync4(to->keys + threadIdx.x,  // the scales of values follow
               scales_ + static_cast<uint64_t>(id) * block_bytes_, IsRead(key) ? 4 : 0);
  }

  // Widens the part of the keys or values `from` that this thread has copied, and stores it in the
  // planes of a tile of bf16.
  __device__ __forceinline__ void Widen(char* from, char* to) const {
    if (kUsedChunks < kChunks && chunk_ >= kUsedChunks) return;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = row_ + i * kRowsAtOnce;
      const uint4 four =
          *reinterpret_cast<const uint4*>(PlaneAddress<kTileKeys>(from, row, chunk_));
      *reinterpret_cast<uint4*>(PlaneAddress<kTileKeys>(to, row, 2 * chunk_)) =
          make_uint4(Bf16FromEvenBytes(four.x), Bf16FromEvenBytes(four.y),
                     Bf16FromEvenBytes(four.z), Bf16FromEvenBytes(four.w));
      *reinterpret_cast<uint4*>(PlaneAddress<kTileKeys>(to, row, 2 * chunk_ + 1)) =
          make_uint4(Bf16FromOddBytes(four.x), Bf16FromOddBytes(four.y), Bf16FromOddBytes(four.z),
                     Bf16FromOddBytes(four.w));
    }
  }

 private:
  __device__ __forceinline__ bool IsRead(int key) const {
    return static_cast<uint32_t>(key - first_) <= span_;
  }

  // Keys that the rows do not read, and columns beyond the cache's, become zeros.
  __device__ __forceinline__ void Start(char* to, const char* from, int tile,
                                        const Blocks& blocks) const {
    if (kUsedChunks < kChunks && chunk_ >= kUsedChunks) return;
    const uint32_t key = static_cast<uint32_t>(tile * kTileKeys + row_ - first_);
    char* const own = PlaneAddress<kTileKeys>(to, row_, chunk_);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const auto id = static_cast<uint32_t>(blocks.of_rows[i * kRowsAtOnce / kPageTokens]);
      const char* block = from + static_cast<uint64_t>(id) * block_bytes_;
      CopyAsync16(own + i * kRowsAtOnce * kPlaneRowBytes,
                  block + i * kRowsAtOnce % kPageTokens * row_bytes_,
                  key + i * kRowsAtOnce <= span_ ? bytes_ : 0);
    }
  }

  const char* keys_;
  const char* values_;
  const char* scales_;
  const int32_t* table_;
  int first_;
  uint32_t span_;  // the rows read keys [first_, first_ + span_]
  int row_;        // the first of the rows of a tile that this thread copies
  int chunk_;      // of each of these rows
  uint32_t block_bytes_;
  int row_bytes_;  // of the cache
  int bytes_;
};

// Multiplies what a thread has of keys [key, key + 8 * kSteps), in the layout of Scores(), by their
// scales.
template <int kSteps>
__device__ __forceinline__ void ScaleKeys(const float (&scales)[kTileKeys], int key,
                                          float (&scores)[kSteps][4]) {
  const float* const own = scales + key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(own + n * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] *= e % 2 == 0 ? pair.x : pair.y;
  }
}

// As Scores() for 16 keys, with keys in int8. Does not multiply by their scales.
template <int kDim, int kRows>
__device__ inline void Int8Scores(char* queries, int row, char* keys, int key,
                                  float (&scores)[2][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < kDim / 16; d += 2) {
    // The chunks d and d + 1 of keys 0 to 7, then of keys 8 to 15.
    uint32_t k[4];
    LoadMatrix4(k, PlaneAddress<kTileKeys>(keys, key + lane / 16 * 8 + lane % 8, d + lane / 8 % 2));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t q[4];
      LoadMatrix4(q, PlaneAddress<kRows>(queries, row + lane % 16, 2 * (d + c) + lane / 16));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        MmaBf16(scores[n], q, {Bf16FromEvenBytes(k[2 * n + c]), Bf16FromOddBytes(k[2 * n + c])});
      }
    }
  }
}

// As AddValues(), with values in int8.
template <int kColumns>
__device__ inline void AddInt8Values(const uint32_t (&p)[4], char* values, int step, int column,
                                     float (&sums)[kColumns / 8][4]) {
  const int lane = threadIdx.x % 32;
  const int key = step * 16 + lane % 16;
  // Adds 16 columns, whose first 8 keys and last 8 keys are in `low` and `high`.
  const auto add = [&](int n, uint32_t low, uint32_t high) {
    MmaBf16(sums[n], p, {Bf16FromEvenBytes(low), Bf16FromEvenBytes(high)});
    MmaBf16(sums[n + 1], p, {Bf16FromOddBytes(low), Bf16FromOddBytes(high)});
  };
  if constexpr (kColumns % 32 == 0) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 4) {
      uint32_t v[4];
      LoadMatrix4Transposed(v,
                            PlaneAddress<kTileKeys>(values, key, column / 16 + n / 2 + lane / 16));
      add(n, v[0], v[1]);
      add(n + 2, v[2], v[3]);
    }
  } else {
    static_assert(kColumns == 16);
    uint32_t v[2];
    LoadMatrix2Transposed(v, PlaneAddress<kTileKeys>(values, key, column / 16));
    add(0, v[0], v[1]);
  }
}

}  // namespace moeserve::cuda

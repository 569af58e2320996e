// Parts of attention on the tensor cores that the split kernel and the tiled kernels share, so that
// a row has the same bits from each of them. Keys are processed in tiles of 64 positions. Within a
// tile, products are added in ascending order, 16 dimensions at a time for the scores and 16 keys
// at a time for the weighted values.
//
// The sum of a row's softmax weights is added in f32, before they are rounded to bf16, in 16
// chains: chain 4 c + q adds the keys k with k / 16 % 4 = c and k % 8 / 2 = q in ascending order,
// because one lane has the scores of these keys in every kernel. SumOfChains() adds the chains at
// the end of a split. All maxima are those of the dot products, as long as scores are these times a
// positive factor; the factor is applied together with the subtraction of the maximum.
#pragma once

#include "kernels/cuda/attention/attention_rows.cuh"

namespace moeserve::cuda {

inline constexpr int kTileKeys = 64;

// Returns 2^x with an error of about 2 ulp; subnormal results become 0. This is exact enough for
// weights that are rounded to bf16.
__device__ inline float Exp2Approximate(float x) {
#ifdef MOESERVE_CUDA_EMULATION
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Keys, values, queries and weights are in shared memory in planes of 64 columns. Returns the
// address of 16-byte chunk `chunk` of row `row`, where planes have kRows rows: it is at chunk index
// chunk ^ (row % 8) of its plane, so that the same chunk of eight successive rows is in different
// banks. wgmma expects this order, and the planes of a cache have it.
template <int kRows>
__device__ __forceinline__ char* PlaneAddress(char* base, int row, int chunk) {
  return base + chunk / 8 * (kRows * kPlaneRowBytes) + row * kPlaneRowBytes +
         (((chunk % 8) ^ (row & 7)) << 4);
}

// Finds the blocks of a tile. Blocks that rows which read keys [first, first + span] do not read
// are 0.
template <int kBlocks>
__device__ __forceinline__ void FindBlocks(const int32_t* table, int first, uint32_t span, int tile,
                                           int32_t (&blocks)[kBlocks]) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const int key = tile * kTileKeys + j * kPageTokens;
    const bool read = key + kPageTokens > first && key - first <= static_cast<int>(span);
    blocks[j] = read ? table[key / kPageTokens] : 0;
  }
}

// Starts the copies of tiles of keys and values of a bf16 cache into shared memory, for all threads
// of a block together. What does not change from tile to tile is computed once, because a copy of
// 16 bytes must not cost more instructions than the arithmetic on them. Key k's 16-byte chunk c is
// stored at PlaneAddress<kTileKeys>(to, k, c).
//
// With kFastPath, tiles that are read completely have code of their own, whose addresses are a
// register and a constant. It pays where few warps share a multiprocessor.
template <int kDim, int kThreads, bool kFastPath>
class TileCopies {
  static constexpr int kChunks = kDim / 8;
  static constexpr int kRowsAtOnce = kThreads / kChunks;
  static constexpr int kCopies = kTileKeys / kRowsAtOnce;
  static_assert(kRowsAtOnce == 4 || kRowsAtOnce == 8 || kRowsAtOnce == kPageTokens);
  static_assert(kDim % kPlaneColumns == 0);

 public:
  // The pages that contain a tile.
  static constexpr int kBlocks = kTileKeys / kPageTokens;
  using Blocks = int32_t[kBlocks];

  __device__ __forceinline__ TileCopies(const KvLayerView& cache, int kv_head,
                                        const BlockKeys& keys)
      : table_(keys.page_table),
        first_(keys.first),
        span_(static_cast<uint32_t>(keys.last - keys.first)),
        row_(ComputedHere(static_cast<int>(threadIdx.x)) / kChunks),
        block_bytes_(static_cast<uint32_t>(cache.block_stride * 2)),
        row_bytes_(cache.in_planes() ? kPlaneRowBytes : cache.padded_dim * 2),
        full_rows_(cache.padded_dim == kDim) {
    const int chunk = ComputedHere(static_cast<int>(threadIdx.x)) % kChunks;
    const int place = row_ * kPlaneRowBytes + (((chunk % 8) ^ (row_ & 7)) << 4);
    to_ = chunk / 8 * (kTileKeys * kPlaneRowBytes) + place;
    // Columns beyond the cache's become zeros.
    const bool stored = chunk < cache.padded_dim / 8;
    bytes_ = stored ? 16 : 0;
    int64_t own = kv_head * cache.head_stride * 2;
    if (stored) own += cache.ElementOf(row_, chunk * 8) * 2;
    keys_ = static_cast<const char*>(cache.keys) + own;
    values_ = static_cast<const char*>(cache.values) + own;
  }

  // Finds the blocks of a tile. Blocks that the rows do not read are 0.
  __device__ __forceinline__ void Find(int tile, Blocks& blocks) const {
    FindBlocks(table_, first_, span_, tile, blocks);
  }

  // `tile` must be the one of Find(), and below the end of the range of tiles.
  __device__ __forceinline__ void StartKeys(char* to, int tile, const Blocks& blocks) const {
    Start(to, keys_, tile, blocks);
  }
  __device__ __forceinline__ void StartValues(char* to, int tile, const Blocks& blocks) const {
    Start(to, values_, tile, blocks);
  }

 private:
  __device__ __forceinline__ void Start(char* to, const char* from, int tile,
                                        const Blocks& blocks) const {
    const int key = tile * kTileKeys - first_;
    if (kFastPath && full_rows_ && key >= 0 && key + kTileKeys - 1 <= static_cast<int>(span_)) {
      StartTile<false>(to, from, tile, blocks, kPlaneRowBytes);
    } else {
      StartTile<true>(to, from, tile, blocks, row_bytes_);
    }
  }

  // With kPartial, keys that the rows do not read, and columns beyond the cache's, become zeros.
  template <bool kPartial>
  __device__ __forceinline__ void StartTile(char* to, const char* from, int tile,
                                            const Blocks& blocks, int row_bytes) const {
    const uint32_t key = static_cast<uint32_t>(tile * kTileKeys + row_ - first_);
    // From the chunk of an even to that of an odd group of rows, in a cache with planes.
    const int turn = row_bytes == kPlaneRowBytes ? (to_ ^ kTurn) - to_ : 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const auto id = static_cast<uint32_t>(blocks[i * kRowsAtOnce / kPageTokens]);
      const char* block = from + static_cast<uint64_t>(id) * block_bytes_;
      if (kTurn != 0 && i % 2 == 1) block += turn;
      const int place = (i % 2 == 0 ? to_ : to_ ^ kTurn) + i * kRowsAtOnce * kPlaneRowBytes;
      const bool read = !kPartial || key + i * kRowsAtOnce <= span_;
      CopyAsync16(to + place, block + i * kRowsAtOnce % kPageTokens * row_bytes,
                  kPartial ? (read ? bytes_ : 0) : 16);
    }
  }

  // The swizzle of odd groups of 4 rows, against that of even ones.
  static constexpr int kTurn = kRowsAtOnce == 4 ? 64 : 0;

  const char* keys_;
  const char* values_;
  const int32_t* table_;
  int first_;
  uint32_t span_;  // the rows read keys [first_, first_ + span_]
  int row_;        // the first of the rows of a tile that this thread copies
  uint32_t block_bytes_;
  int row_bytes_;   // of the cache
  bool full_rows_;  // a row of the cache has kDim columns, in planes
  int bytes_;
  int to_;
};

// Loads the queries of kLoaded of a block's rows, from `first_row` on, as bf16 into planes of kRows
// rows at `to`; elements beyond head_dim and unused rows are zero. kThreads threads call this; each
// passes its index among them.
template <int kDim, int kRows, int kThreads, int kLoaded = kRows>
__device__ __forceinline__ void LoadQueries(const AttentionLaunch& a, const BlockRows<kRows>& rows,
                                            char* to, int thread = threadIdx.x, int first_row = 0) {
  constexpr int kChunks = kDim / 8;
  const int dim = a.cache.head_dim;
  const bool vectors =
      dim % 4 == 0 && a.query_stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.query) % 16 == 0;
  for (int i = thread; i < kLoaded * kChunks; i += kThreads) {
    const int r = first_row + i / kChunks, d = i % kChunks * 8;
    float v[8] = {};
    if (rows.query_row[r] >= 0) {
      const float* q = a.query + rows.query_row[r] * a.query_stride + rows.head[r] * dim;
      if (vectors) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (d + h * 4 >= dim) continue;
          const float4 f = *reinterpret_cast<const float4*>(q + d + h * 4);
          v[h * 4] = f.x, v[h * 4 + 1] = f.y, v[h * 4 + 2] = f.z, v[h * 4 + 3] = f.w;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (d + e < dim) v[e] = q[d + e];
        }
      }
    }
    *reinterpret_cast<uint4*>(PlaneAddress<kRows>(to, r, d / 8)) = make_uint4(
        PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7]));
  }
}

// Computes the scores of the 16 query rows from `row` on for keys [key, key + 8 * kSteps) of the
// tile.
template <int kDim, int kRows, int kSteps>
__device__ inline void Scores(char* queries, int row, char* keys, int key,
                              float (&scores)[kSteps][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
  }
// In tiles, one plane at a time: unrolled completely, the addresses take the registers of the sums.
#pragma unroll(kSteps > 2 ? 4 : kDim / 16)
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t q[4];
    LoadMatrix4(q, PlaneAddress<kRows>(queries, row + lane % 16, 2 * d + lane / 16));
#pragma unroll
    for (int n = 0; n < kSteps; n += 2) {
      uint32_t k[4];
      LoadMatrix4(k, PlaneAddress<kTileKeys>(keys, key + n * 8 + lane / 16 * 8 + lane % 8,
                                             2 * d + lane / 8 % 2));
      MmaBf16(scores[n], q, {k[0], k[1]});
      MmaBf16(scores[n + 1], q, {k[2], k[3]});
    }
  }
}

// The keys [first, last] that each of the two rows of a thread's fragments may see, and the rows'
// positions and heads.
struct RowPair {
  int first[2], last[2];
  int position[2], head[2];
};

template <int kRows>
__device__ inline RowPair RowPairOf(const BlockRows<kRows>& rows, int row, const SeenKeys& seen) {
  RowPair p;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int own = row + static_cast<int>(threadIdx.x) % 32 / 4 + h * 8;
    p.position[h] = rows.position[own];
    p.head[h] = rows.head[own];
    p.first[h] = FirstKey(seen, p.position[h]);
    p.last[h] = LastKey(seen, p.position[h], rows.length);
  }
  return p;
}

// How the products of queries and keys become exponents: times `factor`, minus the reference.
struct ScoreFactor {
  float scale;   // argument of ScoreOf()
  float factor;  // 1 if ScoreOf() is applied to each product before
};

// Whether scores are something else than the products times a positive factor.
__device__ __host__ __forceinline__ bool OwnScores(const AttentionLaunch& a, float scale) {
  return a.bias != nullptr || a.soft_cap > 0.0f || !(scale > 0.0f);
}

// What code is compiled for: kOwn and kPlain mean that OwnScores() is true or false.
enum class ScoreKind { kAny, kPlain, kOwn };

template <ScoreKind kKind = ScoreKind::kAny>
__device__ __forceinline__ ScoreFactor FactorOf(const AttentionLaunch& a, float scale) {
  if constexpr (kKind != ScoreKind::kAny) {
    return {scale, kKind == ScoreKind::kOwn ? 1.0f : scale};
  }
  return {scale, OwnScores(a, scale) ? 1.0f : scale};
}

// The keys [first, last] that all rows of a warp see. Unused rows do not count, because their
// results are not stored.
struct SeenByAll {
  int first, last;

  __device__ __forceinline__ bool Contains(int key, int keys) const {
    return key >= first && key + keys - 1 <= last;
  }
};

// Finds the keys for the warp whose 16 rows begin at `row`.
template <int kRows>
__device__ __forceinline__ SeenByAll SeenByAllOf(const BlockRows<kRows>& rows, int row,
                                                 const SeenKeys& seen) {
  SeenByAll s{0, INT32_MAX};
  if (const int p = rows.position[row + ComputedHere(static_cast<int>(threadIdx.x)) % 16]; p >= 0) {
    s = {FirstKey(seen, p), LastKey(seen, p, rows.length)};
  }
#pragma unroll
  for (int other = 1; other < 16; other *= 2) {
    s.first = max(s.first, __shfl_xor_sync(kFullMask, s.first, other));
    s.last = min(s.last, __shfl_xor_sync(kFullMask, s.last, other));
  }
  return s;
}

// Replaces the dot products of the keys from `key` on by `score_of(dot product, index of the row in
// the pair, key)`, sets the scores that a row may not see to -inf, and raises `maximum` to the
// largest score of each row that this thread has.
template <bool kMasked, int kSteps, typename ScoreFunction>
__device__ __forceinline__ void ReplaceByScores(const RowPair& pair, int key,
                                                const ScoreFunction& score_of,
                                                float (&scores)[kSteps][4], float (&maximum)[2]) {
  const int column = key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = column + n * 8 + e % 2;
      float score = score_of(scores[n][e], e / 2, k);
      if constexpr (kMasked) {
        if (k < pair.first[e / 2] || k > pair.last[e / 2]) score = kMinusInfinity;
      }
      scores[n][e] = score;
      maximum[e / 2] = fmaxf(maximum[e / 2], score);
    }
  }
}

// As ReplaceByScores(), with the scores of ScoreOf(), or the products themselves if FactorOf() has
// a factor; `maximum` becomes the largest one over all lanes that share a row. The rows are those
// of the warp from `row` on; where all of them see all keys, they are not read. The kind of score
// is selected outside of the loops: a branch for every element would make the loops longer than
// the instruction cache.
template <ScoreKind kKind = ScoreKind::kAny, int kRows, int kSteps>
__device__ __forceinline__ void MaskAndMaximum(const AttentionLaunch& a, float scale,
                                               const BlockRows<kRows>& rows, int row,
                                               const SeenByAll& seen, int key,
                                               float (&scores)[kSteps][4], float (&maximum)[2]) {
  const auto product = [](float dot, int, int) { return dot; };
  if (kKind == ScoreKind::kOwn || (kKind == ScoreKind::kAny && OwnScores(a, scale))) {
    const RowPair pair = RowPairOf(rows, row, a.seen);
    const auto score = [&](float dot, int h, int k) {
      return ScoreOf(a, dot, scale, pair.head[h], pair.position[h] - k);
    };
    ReplaceByScores<true>(pair, key, score, scores, maximum);
  } else if (__any_sync(kFullMask, !seen.Contains(key, kSteps * 8))) {
    ReplaceByScores<true>(RowPairOf(rows, row, a.seen), key, product, scores, maximum);
  } else {
    ReplaceByScores<false>({}, key, product, scores, maximum);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(kFullMask, maximum[h], 1));
    maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(kFullMask, maximum[h], 2));
  }
}

inline constexpr int kTileSteps = kTileKeys / 16;

// Online softmax state of two rows: all sums so far are relative to `maximum`. Of the chains of the
// sum of weights (see above), a thread has those of its lane; with kChains = 1, only the one of its
// warp's 16 keys.
template <int kChains>
struct RowState {
  float maximum[2] = {kMinusInfinity, kMinusInfinity};
  float sum[kChains][2] = {};
};

// Factors by which a row pair's sums so far must be multiplied. They are valid if `changed`, which
// is the same for all lanes of a warp; otherwise all of them are 1.
struct Rescaling {
  bool changed;
  float factor[2];
};

// Sets the maximum, which must be at least the one so far, and rescales the sums of weights.
template <int kChains>
__device__ __forceinline__ Rescaling RaiseMaximum(const float (&maximum)[2], float factor,
                                                  RowState<kChains>* state) {
  Rescaling r{false, {1.0f, 1.0f}};
  const bool same = maximum[0] == state->maximum[0] && maximum[1] == state->maximum[1];
  r.changed = __any_sync(kFullMask, !same);
  if (!r.changed) return r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (maximum[h] != state->maximum[h]) {
      r.factor[h] = Exp2Approximate(state->maximum[h] * factor - Reference(maximum[h] * factor));
    }
    state->maximum[h] = maximum[h];
#pragma unroll
    for (int c = 0; c < kChains; ++c) state->sum[c][h] *= r.factor[h];
  }
  return r;
}

template <int kCount>
__device__ __forceinline__ void Rescale(const Rescaling& r, float (&sums)[kCount][4]) {
  if (!r.changed) return;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= r.factor[e / 2];
  }
}

// Replaces the scores of 16 keys, scores[2 * step] and scores[2 * step + 1], by their weights, and
// adds these to their chain.
template <int kSteps>
__device__ __forceinline__ void Weigh(float (&scores)[kSteps][4], int step, float factor,
                                      const float (&reference)[2], float (&sum)[2]) {
#pragma unroll
  for (int n = 2 * step; n < 2 * step + 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = Exp2Approximate(fmaf(scores[n][e], factor, -reference[e / 2]));
      sum[e / 2] += scores[n][e];
    }
  }
}

// Returns the weights of 16 keys as the left operand of the second product.
template <int kSteps>
__device__ __forceinline__ void PackWeights(const float (&weights)[kSteps][4], int step,
                                            uint32_t (&p)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* w = weights[2 * step + i / 2] + i % 2 * 2;
    p[i] = PackBf16(w[0], w[1]);
  }
}

// Returns a row's sum of weights, in all lanes that share the row.
__device__ __forceinline__ float SumOfChains(float c0, float c1, float c2, float c3) {
  float sum = (c0 + c1) + (c2 + c3);
  sum += __shfl_xor_sync(kFullMask, sum, 1);
  sum += __shfl_xor_sync(kFullMask, sum, 2);
  return sum;
}

// Adds the weights of keys [16 * step, 16 * step + 16) of the tile times columns [column, column +
// kColumns) of their values to `sums`.
template <int kColumns>
__device__ inline void AddValues(const uint32_t (&p)[4], char* values, int step, int column,
                                 float (&sums)[kColumns / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
    uint32_t v[4];
    LoadMatrix4Transposed(
        v, PlaneAddress<kTileKeys>(values, step * 16 + lane % 16, column / 8 + n + lane / 16));
    MmaBf16(sums[n], p, {v[0], v[1]});
    MmaBf16(sums[n + 1], p, {v[2], v[3]});
  }
}

// The result of all splits merged so far.
template <int kColumns>
struct MergedRows {
  float maximum[2] = {kMinusInfinity, kMinusInfinity};
  float sum[2] = {};
  float sums[kColumns / 8][4] = {};
};

// Merges the maxima and sums of weights of a finished split, and resets them for the next split.
// The weighted values are merged with the factors in *f.
template <int kChains>
__device__ __forceinline__ void MergeState(const float (&sum)[2], float factor,
                                           RowState<kChains>* state, float (&merged_maximum)[2],
                                           float (&merged_sum)[2], MergeFactors (&f)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    f[h] = Merge(&merged_maximum[h], &merged_sum[h], state->maximum[h] * factor, sum[h]);
    state->maximum[h] = kMinusInfinity;
#pragma unroll
    for (int c = 0; c < kChains; ++c) state->sum[c][h] = 0.0f;
  }
}

// Merges a finished split's weighted values into `merged` and resets them for the next split.
template <int kCount>
__device__ __forceinline__ void MergeValues(const MergeFactors (&f)[2], float (&sums)[kCount][4],
                                            float (&merged)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      merged[n][e] = fmaf(sums[n][e], f[e / 2].split, merged[n][e] * f[e / 2].merged);
      sums[n][e] = 0.0f;
    }
  }
}

}  // namespace moeserve::cuda

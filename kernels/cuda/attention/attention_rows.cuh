// Functions that the attention kernels share: finding the rows of a thread block and the keys that
// they may see, copying cache tiles into shared memory, and merging the splits of a context.
#pragma once

#include "kernels/base/soft_cap.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

inline constexpr float kMinusInfinity = -__builtin_inff();
inline constexpr float kLog2E = 0x1.715476p+0f;

// The rows of a thread block, in shared memory. Unused rows have query_row -1 and position -1.
template <int kRows>
struct BlockRows {
  int32_t query_row[kRows];
  int32_t head[kRows];
  int32_t position[kRows];
  int32_t length;     // LengthOf() the sequence of the rows
  int32_t first_key;  // smallest first key over all rows in use
  int32_t last_key;
  int32_t next_token;  // of ForEachRun()
};

__device__ inline int QueryHead(const AttentionLaunch& a, int kv_head, int i) {
  const int group = a.heads / a.cache.num_kv_heads;
  return a.tile_order ? i * a.cache.num_kv_heads + kv_head : kv_head * group + i;
}

// Returns the number of positions that a sequence has in the launch's page tables; 0 if attention
// is causal, where it does not matter.
__device__ inline int LengthOf(const StepView& step, const SeenKeys& seen, int sequence) {
  return seen.causal || sequence < 0 ? 0 : step.lengths[int64_t{sequence} * step.table_stride];
}

// Returns the first key that a row at this position sees.
__device__ __forceinline__ int FirstKey(const SeenKeys& seen, int position) {
  if (seen.window <= 0 || position < seen.window) return 0;
  return seen.chunks ? position - position % seen.window : position - seen.window + 1;
}
// Returns the last key that a row at this position sees; -1 if the row is not used, whose position
// is -1.
__device__ __forceinline__ int LastKey(const SeenKeys& seen, int position, int length) {
  if (seen.causal || position < 0) return position;
  const int last = length - 1;
  return seen.window > 0 && seen.window <= last - position ? position + seen.window - 1 : last;
}

// Returns the number of query heads of tokens [begin, end) that share one kv head.
__device__ inline int QueryHeadsOf(const AttentionLaunch& a, int begin, int end) {
  const int rows = a.rows.row_offsets == nullptr
                       ? end - begin
                       : a.rows.row_offsets[end] - a.rows.row_offsets[begin];
  return rows * (a.heads / a.cache.num_kv_heads);
}

// Finds the block's rows: of the query heads that tokens [begin, end), all of one sequence, have
// for `kv_head`, those with index [chunk * kRows, (chunk + 1) * kRows). Ends with a barrier.
template <int kRows>
__device__ inline void FindRows(const AttentionLaunch& a, int begin, int end, int kv_head,
                                int chunk, int length, BlockRows<kRows>* rows) {
  const int group = a.heads / a.cache.num_kv_heads;
  const int first_row = a.rows.row_offsets == nullptr ? begin : a.rows.row_offsets[begin];
  const int count = QueryHeadsOf(a, begin, end);
  for (int r = threadIdx.x; r < kRows; r += blockDim.x) {
    const int n = chunk * kRows + r;
    int32_t query_row = -1, position = -1;
    const int slot = n / group;
    const int head = QueryHead(a, kv_head, n % group);
    if (n < count) {
      int token = begin + slot;
      query_row = token;
      if (a.rows.row_offsets != nullptr) {
        query_row = a.rows.assignments_of_row[first_row + slot];
        token = a.rows.row_of_assignment[query_row];
      }
      position = a.step.position[token];
    }
    rows->query_row[r] = query_row;
    rows->head[r] = head;
    rows->position[r] = position;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int first = INT32_MAX, last = -1;
    for (int r = threadIdx.x; r < kRows; r += 32) {
      const int p = rows->position[r];
      if (p < 0) continue;
      first = min(first, FirstKey(a.seen, p));
      last = max(last, LastKey(a.seen, p, length));
    }
    for (int lane = 16; lane > 0; lane /= 2) {
      first = min(first, __shfl_xor_sync(kFullMask, first, lane));
      last = max(last, __shfl_xor_sync(kFullMask, last, lane));
    }
    if (threadIdx.x == 0) {
      rows->length = length;
      rows->first_key = first;
      rows->last_key = last;
    }
  }
  __syncthreads();
}

// Returns the index of row `row` of the chunk among all query heads of its token.
__device__ inline int PartialRow(const AttentionLaunch& a, int chunk, int rows_of_chunk, int row,
                                 int head) {
  const int group = a.heads / a.cache.num_kv_heads;
  return (chunk * rows_of_chunk + row) / group * a.heads + head;
}

// Stores zeros as the output of every row in use, by the first `threads` threads of the block. Zero
// is the result of padding tokens.
template <int kRows>
__device__ inline void StoreZeros(const AttentionLaunch& a, const BlockRows<kRows>& rows,
                                  int threads) {
  const int dim = a.cache.value_dim();
  for (int i = threadIdx.x; i < kRows * dim; i += threads) {
    const int r = i / dim;
    if (rows.query_row[r] < 0) continue;
    const int64_t at = rows.query_row[r] * a.output_stride + rows.head[r] * dim + i % dim;
    if (a.output_dtype == DType::kBF16) {
      static_cast<Bf16*>(a.output)[at] = 0;
    } else {
      static_cast<float*>(a.output)[at] = 0.0f;
    }
  }
}

// Stores elements [column, column + 2) of a row of `dim` elements. The row may start at any
// address.
__device__ inline void StoreBf16Pair(Bf16* row, int column, int dim, float x, float y) {
  if (column >= dim) return;
  const uint32_t pair = PackBf16(x, y);
  if (dim % 2 == 0 && reinterpret_cast<uintptr_t>(row) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(row + column) = pair;
    return;
  }
  row[column] = static_cast<Bf16>(pair);
  if (column + 1 < dim) row[column + 1] = static_cast<Bf16>(pair >> 16);
}

// Tiles start at multiples of the tile size and splits at multiples of the split size, also if a
// window begins within them. So the grouping of a row's sums depends on the row's position alone.
struct TileRange {
  int begin, end;  // tile indices
};

template <int kTileKeys>
__device__ inline TileRange TilesOf(int first_key, int last_key) {
  static_assert(kAttentionAlignment % kTileKeys == 0);
  return {first_key / kTileKeys, last_key / kTileKeys + 1};
}

// The keys that a block's rows read, and the pages that contain them.
struct BlockKeys {
  const int32_t* page_table;  // of the rows' sequence
  int first, last;
  TileRange tiles;
};

// Returns the keys of the whole context that the rows, which belong to `sequence`, read.
template <int kTileKeys, int kRows>
__device__ __forceinline__ BlockKeys KeysOf(const AttentionLaunch& a, int sequence,
                                            const BlockRows<kRows>& rows) {
  return {a.step.page_tables + int64_t{sequence} * a.step.table_stride, rows.first_key,
          rows.last_key, TilesOf<kTileKeys>(rows.first_key, rows.last_key)};
}

// Finds the rows of `chunk` for tokens [begin, end), which belong to one sequence, and the keys
// that these rows read in `split` of their context (-1: in the whole context). The first `threads`
// threads of the block call it; other ones wait at the barriers of FindRows(). Returns false if
// there are no such rows, or if they belong to padding tokens; rows of padding tokens are set to
// zero.
template <int kTileKeys, int kRows>
__device__ __forceinline__ bool FindWork(const AttentionLaunch& a, int begin, int end, int split,
                                         int split_tokens, int kv_head, int chunk,
                                         BlockRows<kRows>* rows, BlockKeys* keys,
                                         int threads = blockDim.x) {
  if (chunk * kRows >= QueryHeadsOf(a, begin, end)) return false;
  const int sequence = a.step.sequence[begin];
  FindRows(a, begin, end, kv_head, chunk, LengthOf(a.step, a.seen, sequence), rows);
  if (sequence < 0) {
    StoreZeros(a, *rows, threads);
    return false;
  }
  *keys = KeysOf<kTileKeys>(a, sequence, *rows);
  if (split >= 0) {
    keys->first = max(keys->first, split * split_tokens);
    keys->last = min(keys->last, (split + 1) * split_tokens - 1);
    keys->tiles = TilesOf<kTileKeys>(keys->first, keys->last);
  }
  return true;
}

// Returns the first token in [begin, end) of another sequence than token `begin`, or `end`. All
// lanes of a warp call this together; each looks at other tokens, because looking at one after
// another takes as long as several tiles of keys.
__device__ __forceinline__ int EndOfRun(const int32_t* sequence, int begin, int end) {
  const int32_t own = sequence[begin];
  for (int base = begin + 1; base < end; base += 32) {
    const int token = base + static_cast<int>(threadIdx.x) % 32;
    const unsigned others = __ballot_sync(kFullMask, token < end && sequence[token] != own);
    if (others != 0) return base + __ffs(static_cast<int>(others)) - 1;
  }
  return end;
}

// Calls f(begin, end) for each run of tokens of one sequence in the block's tile of neighbouring
// tokens. Barriers follow each call, because the rows of the next run overwrite those of this run
// in shared memory. The first blocks compute the last tiles, which have the longest contexts.
// `rows` has where the next run begins: the kernels have no register left for it.
template <int kRows, typename F>
__device__ __forceinline__ void ForEachRun(const AttentionLaunch& a, int tokens_per_tile,
                                           BlockRows<kRows>& rows, const F& f) {
  const auto tile_begin = [&] {
    return a.tiled_from + static_cast<int>(gridDim.x - 1 - blockIdx.x) * tokens_per_tile;
  };
  const auto tile_end = [&] { return min(tile_begin() + tokens_per_tile, a.step.tokens); };
  int begin = tile_begin();
  while (begin < tile_end()) {
    const int end = EndOfRun(a.step.sequence, begin, tile_end());
    if (threadIdx.x == 0) rows.next_token = end;
    f(begin, end);
    __syncthreads();
    begin = rows.next_token;
    __syncthreads();
  }
}

// Starts the copies of tile `tile` of the keys or values into shared memory, kRowBytes per key. The
// 16-byte chunk c of key k is stored at chunk index c ^ (k % 8). Keys that the rows do not read,
// and columns beyond the cache's padded_dim, become zeros. The caller commits the copies. `from` is
// an int8 cache if kInt8, another one if not.
template <int kTileKeys, int kRowBytes, int kThreads, bool kInt8 = false>
__device__ inline void CopyTile(char* to, const void* from, const KvLayerView& cache, int kv_head,
                                const BlockKeys& keys, int tile) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kRows = kThreads / kChunks;  // number of keys that all threads together copy at a
                                             // time
  static_assert(kThreads % kChunks == 0 && kPageTokens % kRows == 0 &&
                kTileKeys % kPageTokens == 0);
  const int element = kInt8 ? 1 : cache.type == KvCacheType::kBF16 ? 2 : 4;
  const auto byte_of = [&](int row, int column) {
    return kInt8 ? cache.ByteOf(row, column) : cache.ElementOf(row, column) * element;
  };
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const bool stored_column = chunk < cache.padded_dim * element / 16;
  const char* head = static_cast<const char*>(from) + kv_head * cache.head_stride * element;
  int32_t blocks[kTileKeys / kPageTokens];
#pragma unroll
  for (int b = 0; b < kTileKeys / kPageTokens; ++b) {
    const int key = tile * kTileKeys + b * kPageTokens;
    const bool read = key <= keys.last && key + kPageTokens > keys.first;
    blocks[b] = read ? keys.page_table[key / kPageTokens] : 0;
  }
#pragma unroll
  for (int b = 0; b < kTileKeys / kPageTokens; ++b) {
    const char* block = head + blocks[b] * cache.block_stride * element;
#pragma unroll
    for (int r = 0; r < kPageTokens; r += kRows) {
      const int tile_row = b * kPageTokens + r + row;
      const int key = tile * kTileKeys + tile_row;
      const bool stored = key >= keys.first && key <= keys.last && stored_column;
      CopyAsync16(to + tile_row * kRowBytes + ((chunk ^ (tile_row & 7)) << 4),
                  stored ? block + byte_of(r + row, chunk * 16 / element) : from, stored ? 16 : 0);
    }
  }
}

// Returns the value to subtract from scores for the maximum m: 0 instead of m if m is -inf, as in a
// row that has not seen a key yet.
__device__ inline float Reference(float m) { return m == kMinusInfinity ? 0.0f : m; }

// Returns the score of a query and a key, times log2(e). `dot` is their dot product, `scale` is
// a.scale times log2(e). `head` is the query's head, `distance` its position minus the key's; both
// are used only with biases. A negative distance counts as 0 if attention is causal.
__device__ __forceinline__ float ScoreOf(const AttentionLaunch& a, float dot, float scale, int head,
                                         int distance) {
  if (a.bias != nullptr) {
    const int most = a.bias_distances - 1;
    const int before = a.seen.causal ? 0 : most;  // elements of negative distances
    const float* const biases = a.bias + int64_t{head} * (before + a.bias_distances);
    return fmaf(dot, scale, biases[max(min(distance, most) + before, 0)] * kLog2E);
  }
  if (a.soft_cap <= 0.0f) return dot * scale;
  return SoftCap(dot * a.scale, a.soft_cap) * kLog2E;
}

// Returns the factor that turns the weighted sum of a row's values into the row's output. `maximum`
// is the row's largest score, `sum` the sum of its weights.
__device__ __forceinline__ float InverseOfSum(const AttentionLaunch& a, int head, float maximum,
                                              float sum) {
  if (a.sinks == nullptr) return 1.0f / sum;
  const float sink = a.sinks[head] * kLog2E;
  const float reference = Reference(fmaxf(maximum, sink));
  const float keep = exp2f(maximum - reference);
  return keep / fmaf(sum, keep, exp2f(sink - reference));
}

// The factors by which Merge() rescales the merged result so far and one split's result. Scores
// include a factor of log2(e), so all exponentials have base 2.
struct MergeFactors {
  float merged, split;
};

__device__ inline MergeFactors Merge(float* merged_max, float* merged_sum, float split_max,
                                     float split_sum) {
  const float m = fmaxf(*merged_max, split_max);
  const float reference = Reference(m);
  const MergeFactors f{exp2f(*merged_max - reference), exp2f(split_max - reference)};
  *merged_sum = fmaf(split_sum, f.split, *merged_sum * f.merged);
  *merged_max = m;
  return f;
}

// Returns the number of floats of the partial results for one query head and one split: padded_dim
// sums, then the maximum and the sum of weights, padded to 4 floats.
__device__ __host__ inline int64_t PartialStride(int padded_dim) { return padded_dim + 4; }

// Returns the partial results of all query heads of a token for one split. PartialRow() is the
// index of a query head in them.
__device__ __forceinline__ float* PartialOf(const AttentionLaunch& a, int token, int split,
                                            int split_tokens) {
  const int slot =
      a.work.slot_of_token[token] + split - FirstKey(a.seen, a.step.position[token]) / split_tokens;
  return a.work.partial + slot * (int64_t{a.rows.max_per_token} * a.heads *
                                  PartialStride(a.cache.padded_value_dim()));
}

}  // namespace moeserve::cuda

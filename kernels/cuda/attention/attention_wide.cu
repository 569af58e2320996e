// Attention with heads that are too wide for the other kernels, and over latent vectors
// ("DeepSeek-V2", section 2.1) that attention_latent_mma.cu does not compute: those in f32, and
// very wide ones. There, all query heads read one kv head, whose values are the first elements of
// its keys. All arithmetic is f32.
//
// A thread block computes kHeads heads of one token and kv head, one per warp, over the whole
// context, and shares the loads of keys and values. Long contexts of few tokens are not split, so
// this kernel does not reach the memory bandwidth there.
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kHeads = 4;
constexpr int kThreads = kHeads * 32;
constexpr int kTileKeys = 16;

// One more column than a key or value has, so that the same element of adjacent ones is in
// different banks.
__device__ __host__ inline int Pitch(const KvLayerView& cache) { return cache.widest_dim() + 1; }

// Returns the shared memory of a thread block in floats: a tile of keys or values, the queries, and
// the weighted sums of values.
__host__ inline int64_t SharedFloats(const KvLayerView& cache) {
  return int64_t{kTileKeys} * Pitch(cache) + int64_t{kHeads} * (cache.head_dim + cache.value_dim());
}

// The tile [tile * kTileKeys, (tile + 1) * kTileKeys) of one kv head's keys or values. Those
// outside of [first, last] are not read, because their memory may hold anything.
struct Tile {
  const int32_t* page_table;
  int kv_head, tile, first, last;
};

// Copies a tile of keys or values, `from` with `dim` elements each, to shared memory.
template <typename Element>
__device__ void StageTile(const KvLayerView& cache, const Tile& t, const void* from, int dim,
                          float* to) {
  const int pitch = Pitch(cache);
  for (int i = threadIdx.x; i < kTileKeys * dim; i += kThreads) {
    const int k = i / dim, d = i % dim;
    const int position = t.tile * kTileKeys + k;
    float value = 0.0f;
    if (position >= t.first && position <= t.last) {
      const int64_t block = t.page_table[position / kPageTokens];
      const int row = position % kPageTokens;
      const int64_t at = block * cache.block_stride + t.kv_head * cache.head_stride +
                         (sizeof(Element) == 1 ? cache.ByteOf(row, d) : cache.ElementOf(row, d));
      if constexpr (sizeof(Element) == 2) {
        value = F32FromBf16(static_cast<const Bf16*>(from)[at]);
      } else if constexpr (sizeof(Element) == 1) {
        value = static_cast<float>(static_cast<const int8_t*>(from)[at]) *
                cache.ScalesOf(from, block, t.kv_head)[row];
      } else {
        value = static_cast<const float*>(from)[at];
      }
    }
    to[k * pitch + d] = value;
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) WideKernel(const AttentionLaunch a, const float scale) {
  GridDependencyPass();
  const int dim = a.cache.head_dim, values = a.cache.value_dim(), pitch = Pitch(a.cache);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x);
  // The warp's query head is number n of those that the token has for the kv head.
  const int kv_head = static_cast<int>(blockIdx.y) % a.cache.num_kv_heads;
  const int chunk = static_cast<int>(blockIdx.y) / a.cache.num_kv_heads;
  const int group = a.heads / a.cache.num_kv_heads, n = chunk * kHeads + warp;
  const int count = QueryHeadsOf(a, token, token + 1);
  if (chunk * kHeads >= count) return;
  const bool used = n < count;
  const int head = QueryHead(a, kv_head, n % group);
  int64_t row = token;
  if (used && a.rows.row_offsets != nullptr) {
    row = a.rows.assignments_of_row[a.rows.row_offsets[token] + n / group];
  }
  float* const keys = DynamicShared<float>();
  float* const query = keys + kTileKeys * pitch + warp * dim;
  float* const sums = keys + kTileKeys * pitch + kHeads * dim + warp * values;
  const int64_t output = row * a.output_stride + int64_t{head} * values;
  const auto store = [&](int d, float value) {
    if (a.output_dtype == DType::kBF16) {
      static_cast<Bf16*>(a.output)[output + d] = static_cast<Bf16>(PackBf16(value, 0.0f));
    } else {
      static_cast<float*>(a.output)[output + d] = value;
    }
  };
  const int sequence = a.step.sequence[token];
  if (sequence < 0) {
    for (int d = lane; used && d < values; d += 32) store(d, 0.0f);
    return;
  }
  for (int d = lane; d < dim; d += 32) {
    query[d] = used ? a.query[row * a.query_stride + int64_t{head} * dim + d] : 0.0f;
  }
  for (int d = lane; d < values; d += 32) sums[d] = 0.0f;

  const int32_t* const page_table = a.step.page_tables + int64_t{sequence} * a.step.table_stride;
  const int own = a.step.position[token];
  const int last = LastKey(a.seen, own, LengthOf(a.step, a.seen, sequence));
  const int first = FirstKey(a.seen, own);
  const TileRange tiles = TilesOf<kTileKeys>(first, last);
  float maximum = kMinusInfinity, sum = 0.0f;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const Tile staged{page_table, kv_head, tile, first, last};
    __syncthreads();
    StageTile<Element>(a.cache, staged, a.cache.keys, dim, keys);
    __syncthreads();
    // Two lanes share a key: one adds the products of the even elements, the other of the odd ones.
    const int k = lane % kTileKeys;
    float dot = 0.0f;
    for (int d = lane / kTileKeys; d < dim; d += 2) {
      dot = fmaf(query[d], keys[k * pitch + d], dot);
    }
    dot += __shfl_xor_sync(kFullMask, dot, kTileKeys);
    const int position = tile * kTileKeys + k;
    const bool seen = position >= first && position <= last;
    const float score = seen ? ScoreOf(a, dot, scale, head, own - position) : kMinusInfinity;
    float highest = fmaxf(maximum, score);
    for (int other = kTileKeys / 2; other > 0; other /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, other));
    }
    const float weight = exp2f(score - Reference(highest));
    float total = weight;
    for (int other = kTileKeys / 2; other > 0; other /= 2) {
      total += __shfl_xor_sync(kFullMask, total, other);
    }
    const float keep = exp2f(maximum - Reference(highest));
    sum = sum * keep + total;
    maximum = highest;
    if (a.cache.latent_dim == 0) {
      __syncthreads();
      StageTile<Element>(a.cache, staged, a.cache.values, values, keys);
      __syncthreads();
    }
    for (int d = lane; d - lane < values; d += 32) {
      float value = d < values ? sums[d] * keep : 0.0f;
      for (int i = 0; i < kTileKeys; ++i) {
        const float w = __shfl_sync(kFullMask, weight, i);
        if (d < values) value = fmaf(w, keys[i * pitch + d], value);
      }
      if (d < values) sums[d] = value;
    }
  }
  if (!used) return;
  const float inverse = InverseOfSum(a, head, maximum, sum);
  for (int d = lane; d < values; d += 32) store(d, sums[d] * inverse);
}

}  // namespace

int64_t WideSharedBytes(const KvLayerView& cache) {
  return SharedFloats(cache) * static_cast<int64_t>(sizeof(float));
}

void LaunchWide(const AttentionLaunch& args, cudaStream_t stream) {
  const int chunks = (GroupOf(args) + kHeads - 1) / kHeads;
  WithElement(args.cache.type, [&]<typename Element>() {
    Launch(WideKernel<Element>,
           {.grid = dim3(static_cast<unsigned>(args.step.tokens),
                         static_cast<unsigned>(args.cache.num_kv_heads * chunks)),
            .block = dim3(kThreads),
            .shared_bytes = static_cast<size_t>(WideSharedBytes(args.cache)),
            .stream = stream,
            .overlaps_predecessor = true},
           args, static_cast<float>(args.scale * 1.4426950408889634));  // log2(e)
  });
}

}  // namespace moeserve::cuda

// Attention over latent vectors ("DeepSeek-V2", section 2.1): all query heads read one kv head,
// whose values are the first elements of its keys. All arithmetic is f32.
//
// A thread block computes kHeads heads of one token, one per warp, over the whole context, and
// shares the loads of keys. Long contexts of few tokens are not split, so this kernel does not
// reach the memory bandwidth there.
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kHeads = 4;
constexpr int kThreads = kHeads * 32;
constexpr int kTileKeys = 16;

// One more column than a key has, so that the same element of adjacent keys is in different banks.
__device__ __host__ inline int KeyPitch(int head_dim) { return head_dim + 1; }

// Returns the shared memory of a thread block in floats: a tile of keys, the queries, and the
// weighted sums of values.
__host__ inline int64_t SharedFloats(const KvLayerView& cache) {
  return int64_t{kTileKeys} * KeyPitch(cache.head_dim) +
         int64_t{kHeads} * (cache.head_dim + cache.latent_dim);
}

// Copies keys [tile * kTileKeys, (tile + 1) * kTileKeys) to shared memory. Keys outside of [first,
// last] become zeros, because their memory may hold anything.
template <typename Element>
__device__ void StageKeys(const AttentionLaunch& a, const int32_t* page_table, int tile, int first,
                          int last, float* keys) {
  const int dim = a.cache.head_dim, pitch = KeyPitch(dim);
  for (int i = threadIdx.x; i < kTileKeys * dim; i += kThreads) {
    const int k = i / dim, d = i % dim;
    const int position = tile * kTileKeys + k;
    float value = 0.0f;
    if (position >= first && position <= last) {
      const int64_t block = page_table[position / kPageTokens];
      const int64_t at =
          block * a.cache.block_stride + int64_t{position % kPageTokens} * a.cache.padded_dim + d;
      if constexpr (sizeof(Element) == 2) {
        value = F32FromBf16(static_cast<const Bf16*>(a.cache.keys)[at]);
      } else {
        value = static_cast<const float*>(a.cache.keys)[at];
      }
    }
    keys[k * pitch + d] = value;
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    LatentKernel(const AttentionLaunch a, const float scale) {
  GridDependencyPass();
  const int dim = a.cache.head_dim, values = a.cache.latent_dim, pitch = KeyPitch(dim);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y) * kHeads + warp;
  const bool used = head < a.heads;
  float* const keys = DynamicShared<float>();
  float* const query = keys + kTileKeys * pitch + warp * dim;
  float* const sums = keys + kTileKeys * pitch + kHeads * dim + warp * values;
  const int64_t output = token * a.output_stride + int64_t{head} * values;
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
    query[d] = used ? a.query[token * a.query_stride + int64_t{head} * dim + d] : 0.0f;
  }
  for (int d = lane; d < values; d += 32) sums[d] = 0.0f;

  const int32_t* const page_table = a.step.page_tables + int64_t{sequence} * a.step.table_stride;
  const int own = a.step.position[token];
  const int last = LastKey(a.seen, own, LengthOf(a.step, a.seen, sequence));
  const int first = FirstKey(a.seen, own);
  const TileRange tiles = TilesOf<kTileKeys>(first, last);
  float maximum = kMinusInfinity, sum = 0.0f;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    __syncthreads();
    StageKeys<Element>(a, page_table, tile, first, last, keys);
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

int64_t LatentSharedBytes(const KvLayerView& cache) {
  return SharedFloats(cache) * static_cast<int64_t>(sizeof(float));
}

void LaunchLatent(const AttentionLaunch& args, cudaStream_t stream) {
  Launch(args.cache.dtype == DType::kBF16 ? LatentKernel<Bf16> : LatentKernel<float>,
         {.grid = dim3(static_cast<unsigned>(args.step.tokens),
                       static_cast<unsigned>((args.heads + kHeads - 1) / kHeads)),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<size_t>(LatentSharedBytes(args.cache)),
          .stream = stream,
          .overlaps_predecessor = true},
         args, static_cast<float>(args.scale * 1.4426950408889634));  // log2(e)
}

}  // namespace moeserve::cuda

#include "base/check.h"
#include "kernels/base/int8_cache.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/positions/head_rows.cuh"
#include "kernels/cuda/positions/norm_rope_append.h"

namespace moeserve::cuda {
namespace {

constexpr int kWarps = 4;  // warps per block if each warp computes one head

enum class Part { kQuery, kKeys, kValues };

// Writes queries in place, and keys and values to the cache. Elements for an int8 cache are staged
// in shared memory until the largest one of their head is known.
template <KvCacheType kType>
struct PartSink {
  CacheSink<kType == KvCacheType::kBF16> cache;
  float* query = nullptr;   // first head of the queries; null: keys or values
  float* staged = nullptr;  // int8: [heads, padded_dim] keys or values
  int dim = 0;

  __device__ __forceinline__ void operator()(int head, int c, float v) const {
    if (query != nullptr) {
      query[head * dim + c] = v;
    } else if constexpr (kType == KvCacheType::kInt8) {
      staged[head * cache.cache.padded_dim + c] = v;
    } else {
      cache(head, c, v);
    }
  }

  // Rounds staged heads begin, begin + step and so on to int8, by the lanes of a warp.
  __device__ __forceinline__ void Round(int begin, int step, int heads) const {
    const KvLayerView& view = cache.cache;
    const int lane = static_cast<int>(threadIdx.x) % 32, width = view.padded_dim;
    for (int head = begin; head < heads; head += step) {
      const float* const x = staged + head * width;
      uint32_t largest = 0;
      for (int c = lane; c < width; c += 32) largest = max(largest, MagnitudeBits(x[c]));
#pragma unroll
      for (int other = 16; other > 0; other /= 2) {
        largest = max(largest, __shfl_xor_sync(kFullMask, largest, other));
      }
      const Int8Scale scale = CacheScaleOf(largest);
      char* const to = static_cast<char*>(cache.data) + cache.first + head * view.head_stride;
      for (int c = lane; c < width; c += 32) {
        reinterpret_cast<int8_t*>(to)[view.ByteOf(cache.row, c)] = RoundToInt8(x[c], scale);
      }
      if (lane == 0) reinterpret_cast<float*>(to)[cache.row] = scale.scale;
    }
  }
};

// Returns where a warp's, or with kBlock a block's, staged elements begin in shared memory.
template <bool kBlock>
__device__ __forceinline__ int StagedAt(int warp, int padded_dim) {
  return kBlock ? kNormSharedFloats : warp * padded_dim;
}

// The grid is [tokens, parts or groups of heads]. With kBlock, the threads of a block share all
// heads of one part (queries, keys or values), which are normalised as one vector; otherwise each
// warp computes one head.
template <KvCacheType kType, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kNormBlock : kWarps * 32)
    NormRopeAppendKernel(const NormRopeAppendLaunch a) {
  GridDependencyPass();
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const int64_t token = blockIdx.x;
  const int kv_heads = a.cache.num_kv_heads;
  using Cache = CacheSink<kType == KvCacheType::kBF16>;
  HeadRows<PartSink<kType>> h{.sink = {.cache = Cache(a.cache)}};
  Part part = Part::kQuery;
  int first = 0;
  if constexpr (kBlock) {
    part = static_cast<Part>(blockIdx.y);
    h.heads = part == Part::kQuery ? a.heads : kv_heads;
  } else {
    const int n = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
    if (n >= a.heads + (a.cache.latent_dim > 0 ? 1 : 2) * kv_heads) return;
    part = n < a.heads ? Part::kQuery : n < a.heads + kv_heads ? Part::kKeys : Part::kValues;
    first = n < a.heads ? n : (n - a.heads) % kv_heads;
  }
  const int sequence = a.step.sequence[token];
  if (sequence < 0 || h.heads == 0) return;
  h.dim = h.sink.dim = part == Part::kValues ? a.cache.value_dim() : a.cache.head_dim;
  h.pairs = part == Part::kValues ? 0 : a.dimensions / 2;
  h.interleaved = a.interleaved;
  h.distance = a.distance;
  const bool own_angles = part == Part::kKeys && a.key_angles != nullptr;
  h.angles = (own_angles ? a.key_angles : a.angles) + token * (a.dimensions / 2);
  if (part == Part::kQuery) {
    h.sink.query = a.query + token * a.query_stride + first * h.dim;
    h.from = h.sink.query;
    h.norm = a.query_norm;
    // Without a norm, only rotated dimensions change.
    h.units = h.normed() ? h.dim - h.pairs : h.pairs;
  } else {
    const bool keys = part == Part::kKeys;
    h.from =
        (keys ? a.keys + token * a.key_stride : a.values + token * a.value_stride) + first * h.dim;
    if (keys) h.norm = a.key_norm;
    h.sink.cache.Find(a.step, sequence, a.step.position[token], keys, first);
    h.units = a.cache.padded_dim - h.pairs;
    if constexpr (kType == KvCacheType::kInt8) {
      h.sink.staged =
          DynamicShared<float>() + StagedAt<kBlock>(threadIdx.x / 32, a.cache.padded_dim);
    }
  }
  h.template Run<kBlock>(lane, DynamicShared<float>());
  if constexpr (kType == KvCacheType::kInt8) {
    if (part == Part::kQuery) return;
    if constexpr (kBlock) {
      __syncthreads();
      h.sink.Round(static_cast<int>(threadIdx.x) / 32, kNormBlock / 32, h.heads);
    } else {
      __syncwarp();
      h.sink.Round(0, 1, h.heads);
    }
  }
}

template <KvCacheType kType>
void LaunchOf(const NormRopeAppendLaunch& a, cudaStream_t stream) {
  const auto tokens = static_cast<unsigned>(a.step.tokens);
  const bool staged = kType == KvCacheType::kInt8;
  const auto floats = [&](int heads, int others) {
    return static_cast<size_t>(others + (staged ? heads * a.cache.padded_dim : 0)) * sizeof(float);
  };
  if (!a.norm_heads && (a.query_norm.scales != nullptr || a.key_norm.scales != nullptr)) {
    Launch(NormRopeAppendKernel<kType, true>,
           {.grid = dim3(tokens, 3),
            .block = dim3(kNormBlock),
            .shared_bytes = floats(a.cache.num_kv_heads, kNormSharedFloats),
            .stream = stream,
            .overlaps_predecessor = true},
           a);
    return;
  }
  const int heads = a.heads + (a.cache.latent_dim > 0 ? 1 : 2) * a.cache.num_kv_heads;
  Launch(NormRopeAppendKernel<kType, false>,
         {.grid = dim3(tokens, static_cast<unsigned>((heads + kWarps - 1) / kWarps)),
          .block = dim3(kWarps * 32),
          .shared_bytes = floats(kWarps, 0),
          .stream = stream,
          .overlaps_predecessor = true},
         a);
}

}  // namespace

void LaunchNormRopeAppend(const NormRopeAppendLaunch& args, cudaStream_t stream) {
  const int pairs = args.dimensions / 2;
  NormRopeAppendLaunch a = args;
  if (a.distance == 0) a.distance = pairs;
  MOESERVE_CHECK(args.dimensions >= 0 && args.dimensions % 2 == 0 && a.distance >= pairs &&
                     a.distance + pairs <= args.cache.head_dim,
                 "rotary dimensions");
  const bool normed = args.query_norm.scales != nullptr || args.key_norm.scales != nullptr;
  MOESERVE_CHECK(args.cache.widest_dim() <= kMaxHeadDim || (args.cache.latent_dim > 0 && !normed),
                 "head_dim");
  static_assert(kMaxHeadDim <= 512, "a warp has the norm of a head");
  MOESERVE_CHECK(args.cache.type != KvCacheType::kInt8 || args.cache.latent_dim == 0,
                 "latent vectors in int8");
  if (a.query_norm.scales == nullptr && a.dimensions == 0) a.heads = 0;
  switch (args.cache.type) {
    case KvCacheType::kF32:
      return LaunchOf<KvCacheType::kF32>(a, stream);
    case KvCacheType::kBF16:
      return LaunchOf<KvCacheType::kBF16>(a, stream);
    case KvCacheType::kInt8:
      return LaunchOf<KvCacheType::kInt8>(a, stream);
  }
}

}  // namespace moeserve::cuda

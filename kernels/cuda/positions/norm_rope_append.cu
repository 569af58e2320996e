#include "base/check.h"
#include "kernels/base/int8_cache.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "kernels/cuda/positions/rope.cuh"
#include "kernels/cuda/rows/norm.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kWarps = 4;  // warps per block if each warp computes one head
constexpr int kUnits = 4;  // number of units that a thread loads at once

enum class Part { kQuery, kKeys, kValues };

// The elements of up to kUnits units that a thread has loaded.
struct Loaded {
  float x[kUnits];
  float y[kUnits];  // second element of a pair
  float2 angle[kUnits];
  float x_scale[kUnits];
  float y_scale[kUnits];
};

// Heads [first, first + heads) of the queries, keys or values of a token. A unit is either a pair
// of dimensions that is rotated, or a single dimension that is not rotated.
template <KvCacheType kType>
struct Heads {
  const NormRopeAppendLaunch& a;
  Part part = Part::kQuery;
  int first = 0;
  int heads = 1;
  const float* from = nullptr;  // first head of the input
  float* query = nullptr;       // first head of the queries, to be written
  void* cache = nullptr;        // keys or values of the cache, to be written
  int64_t cache_at = 0;         // index of the first head of the token's block in `cache`
  float* staged = nullptr;      // [heads, padded_dim] keys or values to be rounded to int8
  int row = 0;                  // of the token in its block
  const float2* angles = nullptr;
  VectorNorm norm = {};
  int pairs = 0;

  __device__ __forceinline__ bool normed() const { return norm.scales != nullptr; }
  __device__ __forceinline__ int dim() const {
    return part == Part::kValues ? a.cache.value_dim() : a.cache.head_dim;
  }
  // In queries without a norm, only rotated dimensions change.
  __device__ __forceinline__ int units() const {
    if (part == Part::kQuery && !normed()) return pairs;
    return (part == Part::kQuery ? dim() : a.cache.padded_dim) - pairs;
  }
  __device__ __forceinline__ int column(int unit) const {
    if (unit < pairs) return a.interleaved ? 2 * unit : unit;
    return unit < partner() ? unit : unit + pairs;
  }
  __device__ __forceinline__ int partner() const { return a.interleaved ? 1 : a.distance; }

  // Calls body(j, head, unit, column, offset from the first head) for units begin, begin + step and
  // so on, up to the number of units that a thread loads at once.
  template <typename Body>
  __device__ __forceinline__ void ForUnits(int begin, int step, const Body& body) const {
    const int per_head = units();
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int n = begin + j * step;
      if (n >= heads * per_head) break;
      const int head = heads == 1 ? 0 : n / per_head, unit = n - head * per_head;
      const int c = column(unit);
      body(j, head, unit, c, head * dim() + c);
    }
  }

  __device__ __forceinline__ void Load(int begin, int step, Loaded& l) const {
    ForUnits(begin, step, [&](int j, int, int unit, int c, int at) {
      l.x[j] = c < dim() ? from[at] : 0.0f;
      if (normed() && c < dim()) l.x_scale[j] = norm.scales[at];
      if (unit < pairs) {
        l.y[j] = from[at + partner()];
        l.angle[j] = angles[unit];
        if (normed()) l.y_scale[j] = norm.scales[at + partner()];
      }
    });
  }

  __device__ __forceinline__ void Finish(int begin, int step, const NormFactors& factors,
                                         const Loaded& l) const {
    ForUnits(begin, step, [&](int j, int head, int unit, int c, int at) {
      float x = l.x[j], y = l.y[j];
      if (normed() && c < dim()) {
        x = factors(x, l.x_scale[j]);
        if (norm.shifts != nullptr) x += norm.shifts[at];
      }
      if (unit < pairs) {
        if (normed()) {
          y = factors(y, l.y_scale[j]);
          if (norm.shifts != nullptr) y += norm.shifts[at + partner()];
        }
        Turn(x, y, l.angle[j]);
        Store(head, c + partner(), y);
      }
      Store(head, c, x);
    });
  }

  __device__ __forceinline__ void Store(int head, int c, float v) const {
    if (part == Part::kQuery) {
      query[head * dim() + c] = v;
      return;
    }
    if constexpr (kType == KvCacheType::kInt8) {
      staged[head * a.cache.padded_dim + c] = v;
      return;
    }
    const int64_t at = cache_at + head * a.cache.head_stride + a.cache.ElementOf(row, c);
    if constexpr (kType == KvCacheType::kBF16) {
      static_cast<Bf16*>(cache)[at] = static_cast<Bf16>(PackBf16(v, 0.0f));
    } else {
      static_cast<float*>(cache)[at] = v;
    }
  }

  // Rounds staged heads begin, begin + step and so on to int8, by the lanes of a warp.
  __device__ __forceinline__ void Round(int begin, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, width = a.cache.padded_dim;
    for (int head = begin; head < heads; head += step) {
      const float* const x = staged + head * width;
      uint32_t largest = 0;
      for (int c = lane; c < width; c += 32) largest = max(largest, MagnitudeBits(x[c]));
#pragma unroll
      for (int other = 16; other > 0; other /= 2) {
        largest = max(largest, __shfl_xor_sync(kFullMask, largest, other));
      }
      const Int8Scale scale = CacheScaleOf(largest);
      char* const to = static_cast<char*>(cache) + cache_at + head * a.cache.head_stride;
      for (int c = lane; c < width; c += 32) {
        reinterpret_cast<int8_t*>(to)[a.cache.ByteOf(row, c)] = RoundToInt8(x[c], scale);
      }
      if (lane == 0) reinterpret_cast<float*>(to)[row] = scale.scale;
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
// warp computes one head. A thread issues all its loads before the first sum waits for one of them;
// the norm's own loads of the same elements then hit the cache.
//
// Elements for an int8 cache are staged in shared memory until the largest one of their head is
// known.
template <KvCacheType kType, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kNormBlock : kWarps * 32)
    NormRopeAppendKernel(const NormRopeAppendLaunch a) {
  GridDependencyPass();
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const int64_t token = blockIdx.x;
  const int kv_heads = a.cache.num_kv_heads;
  Heads<kType> h{.a = a};
  if constexpr (kBlock) {
    h.part = static_cast<Part>(blockIdx.y);
    h.heads = h.part == Part::kQuery ? a.heads : kv_heads;
  } else {
    const int n = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
    if (n >= a.heads + (a.cache.latent_dim > 0 ? 1 : 2) * kv_heads) return;
    h.part = n < a.heads ? Part::kQuery : n < a.heads + kv_heads ? Part::kKeys : Part::kValues;
    h.first = n < a.heads ? n : (n - a.heads) % kv_heads;
  }
  const int sequence = a.step.sequence[token];
  if (sequence < 0 || h.heads == 0) return;
  const int dim = h.dim();

  h.pairs = h.part == Part::kValues ? 0 : a.dimensions / 2;
  const bool own_angles = h.part == Part::kKeys && a.key_angles != nullptr;
  h.angles = (own_angles ? a.key_angles : a.angles) + token * (a.dimensions / 2);
  if (h.part == Part::kQuery) {
    h.query = a.query + token * a.query_stride + h.first * dim;
    h.from = h.query;
    h.norm = a.query_norm;
  } else {
    const bool keys = h.part == Part::kKeys;
    h.from =
        (keys ? a.keys + token * a.key_stride : a.values + token * a.value_stride) + h.first * dim;
    if (keys) h.norm = a.key_norm;
    const int position = a.step.position[token];
    const int64_t block =
        a.step.page_tables[int64_t{sequence} * a.step.table_stride + position / kPageTokens];
    h.cache = keys ? a.cache.keys : a.cache.values;
    h.cache_at = block * a.cache.block_stride + h.first * a.cache.head_stride;
    h.row = position % kPageTokens;
    if constexpr (kType == KvCacheType::kInt8) {
      h.staged = DynamicShared<float>() + StagedAt<kBlock>(threadIdx.x / 32, a.cache.padded_dim);
    }
  }

  Loaded loaded;
  h.Load(lane, kTeam, loaded);
  NormFactors factors;
  if (h.normed()) {
    const int width = h.heads * dim;
    NormVector vector;
    vector.x = const_cast<float*>(h.from);
    vector.threads = kBlock ? NormTeam(width) : 32;
    vector.n = lane < vector.threads ? width : 0;
    vector.lane = lane;
    vector.aligned = Aligned16(vector.x);
    vector.Load();
    factors = FactorsOf<kBlock>(vector, width, h.norm.layer, h.norm.eps, DynamicShared<float>());
  }
  // Each element is written by the thread that has read it, so rows can be updated in place.
  const int total = h.heads * h.units();
  for (int n = lane; n < total; n += kUnits * kTeam) {
    if (n != lane) h.Load(n, kTeam, loaded);
    h.Finish(n, kTeam, factors, loaded);
  }
  if constexpr (kType == KvCacheType::kInt8) {
    if (h.part == Part::kQuery) return;
    if constexpr (kBlock) {
      __syncthreads();
      h.Round(static_cast<int>(threadIdx.x) / 32, kNormBlock / 32);
    } else {
      __syncwarp();
      h.Round(0, 1);
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

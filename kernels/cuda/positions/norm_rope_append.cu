#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/positions/head_rows.cuh"
#include "kernels/cuda/positions/norm_rope_append.h"

namespace moeserve::cuda {
namespace {

constexpr int kWarps = 4;  // warps per block if each warp computes one head

enum class Part { kQuery, kKeys, kValues };

// Writes queries in place, and keys and values to the cache.
template <bool kBf16>
struct PartSink {
  CacheSink<kBf16> cache;
  float* query = nullptr;  // first head of the queries; null: keys or values
  int dim = 0;

  __device__ __forceinline__ void operator()(int head, int c, float v) const {
    if (query != nullptr) {
      query[head * dim + c] = v;
    } else {
      cache(head, c, v);
    }
  }
};

// The grid is [tokens, parts or groups of heads]. With kBlock, the threads of a block share all
// heads of one part (queries, keys or values), which are normalised as one vector; otherwise each
// warp computes one head.
template <bool kBf16, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kNormBlock : kWarps * 32)
    NormRopeAppendKernel(const NormRopeAppendLaunch a) {
  GridDependencyPass();
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const int64_t token = blockIdx.x;
  const int kv_heads = a.cache.num_kv_heads;
  HeadRows<PartSink<kBf16>> h{.sink = {.cache = CacheSink<kBf16>(a.cache)}};
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
  }
  h.template Run<kBlock>(lane, DynamicShared<float>());
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
  const bool bf16 = args.cache.dtype == DType::kBF16;
  MOESERVE_CHECK(bf16 || args.cache.dtype == DType::kF32, "cache type");
  const bool query_norm = a.query_norm.scales != nullptr;
  if (!query_norm && a.dimensions == 0) a.heads = 0;
  const auto tokens = static_cast<unsigned>(a.step.tokens);
  if (!a.norm_heads && (query_norm || a.key_norm.scales != nullptr)) {
    Launch(bf16 ? NormRopeAppendKernel<true, true> : NormRopeAppendKernel<false, true>,
           {.grid = dim3(tokens, 3),
            .block = dim3(kNormBlock),
            .shared_bytes = kNormSharedFloats * sizeof(float),
            .stream = stream,
            .overlaps_predecessor = true},
           a);
    return;
  }
  const int heads = a.heads + (a.cache.latent_dim > 0 ? 1 : 2) * a.cache.num_kv_heads;
  Launch(bf16 ? NormRopeAppendKernel<true, false> : NormRopeAppendKernel<false, false>,
         {.grid = dim3(tokens, static_cast<unsigned>((heads + kWarps - 1) / kWarps)),
          .block = dim3(kWarps * 32),
          .stream = stream,
          .overlaps_predecessor = true},
         a);
}

}  // namespace moeserve::cuda

// What the kernels for single tokens may do first, instead of a launch of LaunchNormRopeAppend():
// they normalise and rotate queries when they read them, and the block that reads a token's own key
// writes the key and its value to the cache. All results have the bits of that launch.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/positions/head_rows.cuh"

namespace moeserve::cuda {

// The argument of kernels that do nothing first, in place of NormRopeAppendLaunch.
struct NoPrepare {};

template <typename Prepare>
inline constexpr bool kPrepares = std::is_same_v<Prepare, NormRopeAppendLaunch>;

// Writes elements of queries as bf16 to planes of kRows rows (see LoadQueries()).
template <int kRows>
struct PlaneSink {
  char* planes;
  int row;

  __device__ __forceinline__ void operator()(int /*head*/, int c, float v) const {
    *reinterpret_cast<Bf16*>(PlaneAddress<kRows>(planes, row, c / 8) + c % 8 * 2) =
        static_cast<Bf16>(PackBf16(v, 0.0f));
  }
};

// As LoadQueries(), for the rows of one token, after their norm and rotation. All threads of the
// block call this; each warp computes a row at a time.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void LoadPreparedQueries(const AttentionLaunch& a,
                                                    const NormRopeAppendLaunch& p, int token,
                                                    const BlockRows<kRows>& rows, char* to) {
  if (p.heads == 0) return LoadQueries<kDim, kRows, kThreads>(a, rows, to);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pairs = p.dimensions / 2;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x) / 32; r < kRows; r += kThreads / 32) {
    if (rows.query_row[r] < 0) {
      for (int chunk = lane; chunk < kDim / 8; chunk += 32) {
        *reinterpret_cast<uint4*>(PlaneAddress<kRows>(to, r, chunk)) = make_uint4(0, 0, 0, 0);
      }
      continue;
    }
    const int dim = a.cache.head_dim;
    const HeadRows<PlaneSink<kRows>> h{
        .sink = {to, r},
        .dim = dim,
        .units = kDim - pairs,
        .pairs = pairs,
        .interleaved = p.interleaved,
        .distance = p.distance,
        .from = a.query + rows.query_row[r] * a.query_stride + rows.head[r] * dim,
        .angles = p.angles + int64_t{token} * pairs,
        .norm = p.query_norm};
    h.template Run<false>(lane, nullptr);
  }
}

// Writes the key and the value of a token for one kv head to the bf16 cache. Ends with a barrier,
// after which the block's copies may read them. Several blocks may write the same bytes.
__device__ __forceinline__ void AppendToken(const AttentionLaunch& a, const NormRopeAppendLaunch& p,
                                            int token, int sequence, int position, int kv_head) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < 2) {
    const bool keys = warp == 0;
    const int pairs = keys ? p.dimensions / 2 : 0;
    HeadRows<CacheSink<true>> h{.sink = CacheSink<true>(a.cache)};
    h.sink.Find(a.step, sequence, position, keys, kv_head);
    h.dim = keys ? a.cache.head_dim : a.cache.value_dim();
    h.units = a.cache.padded_dim - pairs;
    h.pairs = pairs;
    h.interleaved = p.interleaved;
    h.distance = p.distance;
    h.from = (keys ? p.keys + token * p.key_stride : p.values + token * p.value_stride) +
             kv_head * h.dim;
    h.angles = (keys && p.key_angles != nullptr ? p.key_angles : p.angles) + int64_t{token} * pairs;
    if (keys) h.norm = p.key_norm;
    h.template Run<false>(lane, nullptr);
  }
  __syncthreads();
}

// Returns `args.prepare` in the form that kernels take.
inline NormRopeAppendLaunch PrepareOf(const AttentionLaunch& args) {
  NormRopeAppendLaunch p = *args.prepare;
  const bool changes = p.query_norm.scales != nullptr || p.dimensions > 0;
  if (!changes) p.heads = 0;
  if (p.distance == 0) p.distance = p.dimensions / 2;
  return p;
}

}  // namespace moeserve::cuda

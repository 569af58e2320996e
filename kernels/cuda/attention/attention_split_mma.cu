// Attention of single tokens over a bf16 or int8 cache on the tensor cores. A thread block computes
// one split of a token's context (or all splits, if the token is not split).
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_prepare.cuh"
#include "kernels/cuda/attention/attention_split.cuh"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

// With one buffer for the values of wide heads in bf16, two blocks share a multiprocessor.
template <int kDim, bool kInt8>
using SplitShared = SharedSplit<kDim, kDim <= 128 || kInt8 ? 2 : 1, kInt8>;

template <int kDim>
__device__ __forceinline__ void StorePartial(const AttentionLaunch& a,
                                             const BlockRows<kSplitRows>& rows, int chunk,
                                             float* partial, const float (&maximum)[2],
                                             const float (&sum)[2], const SplitSums<kDim>& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int padded = a.cache.padded_dim;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    if (rows.query_row[row] < 0) continue;
    float* to =
        partial + PartialRow(a, chunk, kSplitRows, row, rows.head[row]) * PartialStride(padded);
#pragma unroll
    for (int n = 0; n < kSplitColumns<kDim> / 8; ++n) {
      const int column = warp * kSplitColumns<kDim> + n * 8 + lane % 4 * 2;
      if (column < padded) {
        *reinterpret_cast<float2*>(to + column) = make_float2(sums[n][h * 2], sums[n][h * 2 + 1]);
      }
    }
    if (warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + padded) = make_float2(maximum[h], sum[h]);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void StoreFinished(const AttentionLaunch& a,
                                              const BlockRows<kSplitRows>& rows,
                                              const MergedRows<kSplitColumns<kDim>>& merged) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int dim = a.cache.value_dim();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    if (rows.query_row[row] < 0) continue;
    const float inverse = InverseOfSum(a, rows.head[row], merged.maximum[h], merged.sum[h]);
    Bf16* to =
        static_cast<Bf16*>(a.output) + rows.query_row[row] * a.output_stride + rows.head[row] * dim;
#pragma unroll
    for (int n = 0; n < kSplitColumns<kDim> / 8; ++n) {
      const int column = warp * kSplitColumns<kDim> + n * 8 + lane % 4 * 2;
      StoreBf16Pair(to, column, dim, merged.sums[n][h * 2] * inverse,
                    merged.sums[n][h * 2 + 1] * inverse);
    }
  }
}

// `prepare` is NormRopeAppendLaunch, with a bf16 cache, or NoPrepare.
template <int kDim, bool kInt8, typename Prepare>
__global__ void __launch_bounds__(kSplitThreads)
    SplitKernel(const AttentionLaunch a, const int split_tokens, const float scale,
                const Prepare prepare) {
  GridDependencyPass();
  const int item = blockIdx.x;
  if (item >= *a.work.item_count) return;
  const int token = a.work.item_token[item];
  const int split = a.work.item_split[item];
  const int kv_head = blockIdx.y % a.cache.num_kv_heads;
  const int chunk = blockIdx.y / a.cache.num_kv_heads;
  auto& shared = *DynamicShared<SplitShared<kDim, kInt8>>();
  if constexpr (kPrepares<Prepare>) {
    const int sequence = a.step.sequence[token], position = a.step.position[token];
    // A token may have no query rows.
    if (sequence >= 0 && (split < 0 || split == position / split_tokens)) {
      AppendToken(a, prepare, token, sequence, position, kv_head);
    }
  }
  BlockKeys range;
  if (!FindWork<kTileKeys>(a, token, token + 1, split, split_tokens, kv_head, chunk, &shared.rows,
                           &range)) {
    return;
  }
  const SplitTiles tiles{range.tiles.begin, range.tiles.end, split_tokens / kTileKeys};
  MergedRows<kSplitColumns<kDim>> merged;
  ComputeSplits(
      a, scale, kv_head, range, tiles, shared,
      [&] {
        if constexpr (kPrepares<Prepare>) {
          LoadPreparedQueries<kDim, kSplitRows, kSplitThreads>(a, prepare, token, shared.rows,
                                                               shared.queries);
        } else {
          LoadQueries<kDim, kSplitRows, kSplitThreads>(a, shared.rows, shared.queries);
        }
      },
      [&](float factor, RowState<1>* state, SplitSums<kDim>& sums) {
        float sum[2];
        ShareSums(shared, *state, sum);
        if (split >= 0) {
          const float maximum[2] = {state->maximum[0] * factor, state->maximum[1] * factor};
          StorePartial<kDim>(a, shared.rows, chunk, PartialOf(a, token, split, split_tokens),
                             maximum, sum, sums);
        } else {
          MergeFactors f[2];
          MergeState(sum, factor, state, merged.maximum, merged.sum, f);
          MergeValues(f, sums, merged.sums);
        }
      });
  if (split < 0) StoreFinished<kDim>(a, shared.rows, merged);
}

template <int kDim, bool kInt8, typename Prepare>
void LaunchOf(const AttentionLaunch& args, const Prepare& prepare, cudaStream_t stream) {
  const int group = GroupOf(args);
  const int chunks = (group + kSplitRows - 1) / kSplitRows;
  Launch(SplitKernel<kDim, kInt8, Prepare>,
         {.grid = dim3(MaxItems(args), args.cache.num_kv_heads * chunks),
          .block = dim3(kSplitThreads),
          .shared_bytes = sizeof(SplitShared<kDim, kInt8>),
          .stream = stream,
          .overlaps_predecessor = true},
         args, SplitTokensOf(args), args.scale * kLog2E, prepare);
}

}  // namespace

void LaunchSplitMma(const AttentionLaunch& args, cudaStream_t stream) {
  const bool int8 = args.cache.type == KvCacheType::kInt8;
  MOESERVE_CHECK(!int8 || args.prepare == nullptr, "attention appends to bf16 caches only");
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() {
    if (args.prepare != nullptr) {
      LaunchOf<kDim, false>(args, PrepareOf(args), stream);
    } else if (int8) {
      LaunchOf<kDim, true>(args, NoPrepare{}, stream);
    } else {
      LaunchOf<kDim, false>(args, NoPrepare{}, stream);
    }
  });
}

}  // namespace moeserve::cuda

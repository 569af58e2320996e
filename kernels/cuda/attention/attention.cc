#include "kernels/cuda/attention/attention.h"

#include "base/check.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_latent_mma.h"

namespace moeserve::cuda {
namespace {

void LaunchLatentSplits(const AttentionLaunch& args, cudaStream_t stream) {
  // With up to 16 heads, two blocks of the other kernel share a multiprocessor. With more, shared
  // memory limits it.
  if (args.heads > 16 && LatentWgmmaFits(args.cache)) {
    LaunchLatentSplitWgmma(args, stream);
  } else {
    LaunchLatentSplitMma(args, false, stream);
  }
}

}  // namespace

void LaunchAttention(const AttentionLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.bias == nullptr || (args.bias_distances > 0 && args.soft_cap == 0.0f &&
                                          args.cache.latent_dim == 0),
                 "biases of distances");
  MOESERVE_CHECK(args.seen.causal || args.step.lengths != nullptr, "lengths of page tables");
  if (args.cache.latent_dim > 0) {
    MOESERVE_CHECK(args.cache.num_kv_heads == 1 && args.rows.row_offsets == nullptr,
                   "attention over latent vectors");
  } else {
    MOESERVE_CHECK(args.cache.head_dim > 0 && args.cache.widest_dim() <= kMaxHeadDim, "head_dim");
  }
  if (IsWide(args.cache, args.output_dtype)) {
    if (args.step.tokens > 0) LaunchWide(args, stream);
    return;
  }
  MOESERVE_CHECK(args.heads > 0 && args.heads % args.cache.num_kv_heads == 0, "query heads");
  MOESERVE_CHECK(args.tiled_from >= 0 && args.tiled_from <= args.step.tokens, "tiled_from");
  const bool latent = args.cache.latent_dim > 0;
  const bool mma = args.cache.dtype == DType::kBF16 && args.output_dtype == DType::kBF16;
  MOESERVE_CHECK(!mma || args.cache.block_stride * 2 <= INT32_MAX, "bytes of a page");
  if (args.tiled_from > 0) {
    MOESERVE_CHECK(args.tiled_from <= args.work.max_tokens && args.step.max_context > 0,
                   "attention work list");
    if (latent) {
      LaunchLatentSplits(args, stream);
    } else {
      (mma ? LaunchSplitMma : LaunchSplitF32)(args, stream);
    }
    if (MaxSplits(args.step.max_context, args.seen, SplitTokensOf(args)) > 1) {
      LaunchMergeSplits(args, stream);
    }
  }
  if (args.tiled_from == args.step.tokens) return;
  if (latent) {
    LaunchLatentTiledMma(args, stream);
  } else if (!mma) {
    LaunchTiledF32(args, stream);
  } else if (TiledWgmmaFits()) {
    LaunchTiledWgmma(args, stream);
  } else {
    LaunchTiledMma(args, stream);
  }
}

}  // namespace moeserve::cuda

#include "kernels/cuda/attention/attention.h"

#include "base/check.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_latent_mma.h"

namespace moeserve::cuda {
namespace {

bool IsMma(const AttentionLaunch& args) {
  return args.cache.type != KvCacheType::kF32 && args.output_dtype == DType::kBF16;
}

// Returns the number of blocks per cluster; 0 without clusters.
int ClusterBlocksOf(AttentionSplits splits) {
  switch (splits) {
    case AttentionSplits::kAuto:
    case AttentionSplits::kMerged:
      break;
    case AttentionSplits::kCluster4:
      return 4;
    case AttentionSplits::kCluster8:
      return 8;
    case AttentionSplits::kCluster16:
      return 16;
  }
  return 0;
}

void LaunchLatentSplits(const AttentionLaunch& args, cudaStream_t stream) {
  // With up to 16 heads, two blocks of the other kernel share a multiprocessor. With more, shared
  // memory limits it.
  if (args.heads > 16 && LatentWgmmaFits(args.cache)) {
    LaunchLatentSplitWgmma(args, stream);
  } else {
    LaunchLatentSplitMma(args, false, stream);
  }
}

// Computes tokens [tiled_from, tokens) on the tensor cores.
void LaunchTiledTensor(const AttentionLaunch& args, cudaStream_t stream) {
  if (args.cache.type == KvCacheType::kInt8) {
    const bool turns = args.tiles == AttentionTiles::kPingPong && PingPongFits(args.cache);
    return (turns ? LaunchPingPongInt8 : LaunchTiledInt8)(args, stream);
  }
  const AttentionTiles tiles =
      args.tiles == AttentionTiles::kAuto ? AttentionTiles::kWarpgroup : args.tiles;
  if (tiles == AttentionTiles::kMma || !TiledWgmmaFits()) return LaunchTiledMma(args, stream);
  if (tiles == AttentionTiles::kPingPong && PingPongFits(args.cache)) {
    return LaunchPingPong(args, stream);
  }
  LaunchTiledWgmma(args, stream);
}

void LaunchSplits(const AttentionLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(CanUseSplits(args, args.splits), "clusters of attention");
  if (const int blocks = ClusterBlocksOf(args.splits); blocks > 0) {
    LaunchClusterMma(args, blocks, stream);
    return;
  }
  MOESERVE_CHECK(args.tiled_from <= args.work.max_tokens && args.step.max_context > 0,
                 "attention work list");
  if (args.cache.latent_dim > 0) {
    LaunchLatentSplits(args, stream);
  } else {
    (IsMma(args) ? LaunchSplitMma : LaunchSplitF32)(args, stream);
  }
  if (MaxSplits(args.step.max_context, args.seen, SplitTokensOf(args)) > 1) {
    LaunchMergeSplits(args, stream);
  }
}

}  // namespace

bool CanUseSplits(const AttentionLaunch& args, AttentionSplits splits) {
  const int blocks = ClusterBlocksOf(splits);
  return blocks == 0 ||
         (IsMma(args) && args.cache.latent_dim == 0 && !IsWide(args.cache, args.output_dtype) &&
          ClusterAttentionFits(args, blocks));
}

bool CanPrepare(const AttentionLaunch& args) {
  const NormRopeAppendLaunch& p = *args.prepare;
  const bool normed = p.query_norm.scales != nullptr || p.key_norm.scales != nullptr;
  return IsMma(args) && args.cache.type == KvCacheType::kBF16 && args.cache.latent_dim == 0 &&
         !IsWide(args.cache, args.output_dtype) && args.tiled_from == args.step.tokens &&
         args.seen.causal && (p.norm_heads || !normed);
}

std::span<const AttentionTiles> AttentionTilesThatFit(const AttentionLaunch& args) {
  static constexpr AttentionTiles kMma[] = {AttentionTiles::kMma, AttentionTiles::kPingPong};
  static constexpr AttentionTiles kWgmma[] = {AttentionTiles::kWarpgroup,
                                              AttentionTiles::kPingPong};
  if (!IsMma(args) || args.cache.latent_dim > 0 || IsWide(args.cache, args.output_dtype)) return {};
  const bool mma = args.cache.type == KvCacheType::kInt8 || !TiledWgmmaFits();
  return std::span(mma ? kMma : kWgmma).first(PingPongFits(args.cache) ? 2 : 1);
}

void LaunchAttention(const AttentionLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.bias == nullptr || (args.bias_distances > 0 && args.soft_cap == 0.0f &&
                                          args.cache.latent_dim == 0),
                 "biases of distances");
  MOESERVE_CHECK(args.seen.causal || args.step.lengths != nullptr, "lengths of page tables");
  if (args.cache.latent_dim > 0) {
    MOESERVE_CHECK(args.cache.num_kv_heads == 1 && args.rows.row_offsets == nullptr &&
                       args.cache.type != KvCacheType::kInt8,
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
  MOESERVE_CHECK(args.prepare == nullptr || CanPrepare(args), "keys that attention appends");
  const bool latent = args.cache.latent_dim > 0;
  const bool mma = IsMma(args);
  MOESERVE_CHECK(!mma || args.cache.block_stride * ElementBytes(args.cache.type) <= INT32_MAX,
                 "bytes of a page");
  if (args.tiled_from > 0) LaunchSplits(args, stream);
  if (args.tiled_from == args.step.tokens) return;
  if (latent) {
    LaunchLatentTiledMma(args, stream);
  } else {
    (mma ? LaunchTiledTensor : LaunchTiledF32)(args, stream);
  }
}

}  // namespace moeserve::cuda

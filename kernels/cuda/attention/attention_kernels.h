// The kernels that LaunchAttention() selects from. LaunchAttention() checks the arguments.
#pragma once

#include "kernels/cuda/attention/attention.h"

namespace moeserve::cuda {

// Compute tokens [0, tiled_from), one work item per thread block: partial results for tokens that
// are split, finished rows for tokens that are not.
void LaunchSplitMma(const AttentionLaunch& args, cudaStream_t stream);
void LaunchSplitF32(const AttentionLaunch& args, cudaStream_t stream);
// Merges the partial results of the split tokens into finished rows.
void LaunchMergeSplits(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchSplitMma() and LaunchMergeSplits() together, by clusters of `blocks` blocks (4, 8 or
// 16), without a work list. ClusterAttentionFits() returns whether the current device can run it.
bool ClusterAttentionFits(const AttentionLaunch& args, int blocks);
void LaunchClusterMma(const AttentionLaunch& args, int blocks, cudaStream_t stream);
// Compute tokens [tiled_from, tokens).
void LaunchTiledMma(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchTiledMma(), over an int8 cache.
void LaunchTiledInt8(const AttentionLaunch& args, cudaStream_t stream);
void LaunchTiledF32(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchTiledMma(), by wgmma: the same bits. TiledWgmmaFits() returns whether the current device
// has wgmma (compute capability 9.0).
bool TiledWgmmaFits();
void LaunchTiledWgmma(const AttentionLaunch& args, cudaStream_t stream);
// As LaunchTiledWgmma() or, over an int8 cache, LaunchTiledInt8(), with several warpgroups that
// take turns: the same bits. PingPongFits() returns whether the current device and the cache allow
// it.
bool PingPongFits(const KvLayerView& cache);
void LaunchPingPong(const AttentionLaunch& args, cudaStream_t stream);
void LaunchPingPongInt8(const AttentionLaunch& args, cudaStream_t stream);

// Computes all tokens of a layer with heads wider than kMaxTiledDim, or whose values are the first
// elements of its keys.
void LaunchWide(const AttentionLaunch& args, cudaStream_t stream);
// Returns the shared memory that a thread block of LaunchWide() needs.
int64_t WideSharedBytes(const KvLayerView& cache);

// Returns the largest number of query vectors of one token that read the same kv head: query heads
// per kv head, times the largest number of query rows of a token.
inline int GroupOf(const AttentionLaunch& args) {
  return args.heads / args.cache.num_kv_heads * args.rows.max_per_token;
}

// Returns the number of tokens per split for this launch.
inline int SplitTokensOf(const AttentionLaunch& args) {
  return SplitTokens(args.heads / args.cache.num_kv_heads * args.rows.by_shape);
}

// Returns the number of thread blocks that is enough for all work items.
inline int MaxItems(const AttentionLaunch& args) {
  const int64_t splits = MaxSplits(args.step.max_context, args.seen, SplitTokensOf(args));
  const int64_t items = splits * args.tiled_from;
  const int64_t bound = int64_t{args.work.slots} + args.tiled_from;
  return static_cast<int>(items < bound ? items : bound);
}

// Calls f with the narrowest width of heads that kernels are compiled for and that is at least
// `head_dim`, as a template argument.
template <typename F>
void WithWidthOfHeads(int head_dim, const F& f) {
  if (head_dim <= 64) {
    f.template operator()<64>();
  } else if (head_dim <= 128) {
    f.template operator()<128>();
  } else {
    f.template operator()<256>();
  }
}

// Calls f with the type of a cache's elements as a template argument.
template <typename F>
void WithElement(KvCacheType type, const F& f) {
  if (type == KvCacheType::kF32) {
    f.template operator()<float>();
  } else if (type == KvCacheType::kBF16) {
    f.template operator()<Bf16>();
  } else {
    f.template operator()<int8_t>();
  }
}

// The grid of a tiled launch whose thread blocks compute `rows` rows each.
struct TiledShape {
  int tokens_per_tile, tiles, chunks;
};

inline TiledShape TiledShapeOf(const AttentionLaunch& args, int rows) {
  const int group = GroupOf(args);
  TiledShape s;
  s.tokens_per_tile = rows >= group ? rows / group : 1;
  s.tiles = (args.step.tokens - args.tiled_from + s.tokens_per_tile - 1) / s.tokens_per_tile;
  s.chunks = (s.tokens_per_tile * group + rows - 1) / rows;
  return s;
}

}  // namespace moeserve::cuda

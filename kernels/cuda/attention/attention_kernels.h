// The kernels between which LaunchAttention chooses; arguments are checked there.
#pragma once

#include "kernels/cuda/attention/attention.h"

namespace moeserve::cuda {

// Tokens [0, tiled_from), one work item per thread block: partial results of the tokens that are
// split, finished rows of the others.
void LaunchSplitMma(const AttentionLaunch& args, cudaStream_t stream);
void LaunchSplitF32(const AttentionLaunch& args, cudaStream_t stream);
// Merges the partial results.
void LaunchMergeSplits(const AttentionLaunch& args, cudaStream_t stream);
// Tokens [tiled_from, tokens).
void LaunchTiledMma(const AttentionLaunch& args, cudaStream_t stream);
void LaunchTiledF32(const AttentionLaunch& args, cudaStream_t stream);

// Query heads that share a kv head, over all rows that a token may have.
inline int GroupOf(const AttentionLaunch& args) {
  return args.heads / args.cache.num_kv_heads * args.rows.max_per_token;
}

// Tokens of one split of the launch.
inline int SplitTokensOf(const AttentionLaunch& args) {
  return SplitTokens(args.heads / args.cache.num_kv_heads);
}

// Thread blocks that cover every work item.
inline int MaxItems(const AttentionLaunch& args) {
  const int64_t splits = MaxSplits(args.step.max_context, args.window, SplitTokensOf(args));
  const int64_t items = splits * args.tiled_from;
  const int64_t bound = int64_t{args.work.slots} + args.tiled_from;
  return static_cast<int>(items < bound ? items : bound);
}

// How rows of a tiled launch map to thread blocks of `rows` rows each.
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

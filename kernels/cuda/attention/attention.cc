#include "kernels/cuda/attention/attention.h"

#include "base/check.h"
#include "kernels/cuda/attention/attention_kernels.h"

namespace moeserve::cuda {
namespace {

// Computes tokens [tiled_from, tokens) over a bf16 cache.
void LaunchTiledBf16(const AttentionLaunch& args, cudaStream_t stream) {
  const AttentionTiles tiles =
      args.tiles == AttentionTiles::kAuto ? AttentionTiles::kWarpgroup : args.tiles;
  if (tiles == AttentionTiles::kMma || !TiledWgmmaFits()) return LaunchTiledMma(args, stream);
  if (tiles == AttentionTiles::kPingPong && PingPongFits(args.cache)) {
    return LaunchPingPong(args, stream);
  }
  LaunchTiledWgmma(args, stream);
}

bool IsBf16(const AttentionLaunch& args) {
  return args.cache.dtype == DType::kBF16 && args.output_dtype == DType::kBF16;
}

}  // namespace

std::span<const AttentionTiles> AttentionTilesThatFit(const AttentionLaunch& args) {
  static constexpr AttentionTiles kMma[] = {AttentionTiles::kMma};
  static constexpr AttentionTiles kWgmma[] = {AttentionTiles::kWarpgroup,
                                              AttentionTiles::kPingPong};
  if (IsWide(args.cache) || !IsBf16(args)) return {};
  if (!TiledWgmmaFits()) return kMma;
  return std::span(kWgmma).first(PingPongFits(args.cache) ? 2 : 1);
}

void LaunchAttention(const AttentionLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.bias == nullptr || (args.bias_distances > 0 && args.soft_cap == 0.0f &&
                                          args.cache.latent_dim == 0),
                 "biases of distances");
  MOESERVE_CHECK(args.seen.causal || args.step.lengths != nullptr, "lengths of page tables");
  if (args.cache.latent_dim > 0) {
    MOESERVE_CHECK(args.cache.num_kv_heads == 1 && args.rows.row_offsets == nullptr,
                   "attention over latent vectors");
    if (args.step.tokens > 0) LaunchWide(args, stream);
    return;
  }
  MOESERVE_CHECK(args.cache.head_dim > 0 && args.cache.widest_dim() <= kMaxHeadDim, "head_dim");
  if (IsWide(args.cache)) {
    if (args.step.tokens > 0) LaunchWide(args, stream);
    return;
  }
  MOESERVE_CHECK(args.heads > 0 && args.heads % args.cache.num_kv_heads == 0, "query heads");
  MOESERVE_CHECK(args.tiled_from >= 0 && args.tiled_from <= args.step.tokens, "tiled_from");
  const bool mma = IsBf16(args);
  MOESERVE_CHECK(!mma || args.cache.block_stride * 2 <= INT32_MAX, "bytes of a page");
  if (args.tiled_from > 0) {
    MOESERVE_CHECK(args.tiled_from <= args.work.max_tokens && args.step.max_context > 0,
                   "attention work list");
    (mma ? LaunchSplitMma : LaunchSplitF32)(args, stream);
    if (MaxSplits(args.step.max_context, args.seen, SplitTokensOf(args)) > 1) {
      LaunchMergeSplits(args, stream);
    }
  }
  if (args.tiled_from == args.step.tokens) return;
  (mma ? LaunchTiledBf16 : LaunchTiledF32)(args, stream);
}

}  // namespace moeserve::cuda

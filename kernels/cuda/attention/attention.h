// Attention of the tokens of one step over the KV cache, on the device.
//
// All pointers are device pointers, and all launches are asynchronous on `stream`. Data that
// changes from step to step is read on the device. Launch shapes depend only on the fields of these
// structs, so a captured launch may be replayed after the contents of the same arrays have changed.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/base/dtype.h"
#include "kernels/cuda/cache/kv_layer_view.h"
#include "kernels/cuda/cache/step_view.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/positions/norm_rope_append.h"

namespace moeserve::cuda {

// The query rows of each token, as arrays of a RoutingPlan. If all pointers are null, row t is the
// query row of token t.
struct QueryRows {
  const int32_t* row_offsets = nullptr;         // [tokens + 1]
  const int32_t* assignments_of_row = nullptr;  // [A]
  const int32_t* row_of_assignment = nullptr;   // [A]
  int max_per_token = 1;                        // largest number of rows of one token
  int by_shape = 1;  // rows of one token by the model's shape; determines the size of splits
};

// The keys that a row sees: those of AttentionArgs.
struct SeenKeys {
  bool causal = true;
  int window = 0;  // 0 disables the sliding window
  bool chunks = false;
};

// How the contexts of tokens [0, tiled_from) of a step are divided into splits that run
// concurrently. LaunchAttentionWork() computes it once per step for each kind of seen keys and
// split size, and LaunchAttention() reads it. All layers share the memory of the partial results,
// because launches on one stream use it one after another.
struct AttentionWork {
  int max_tokens = 0;  // the largest number of tokens in a step
  int slots = 0;  // the largest number of splits; a token for which no slots are left is not split
  int32_t* item_count = nullptr;     // [1]
  int32_t* item_token = nullptr;     // [slots + max_tokens]
  int32_t* item_split = nullptr;     // [slots + max_tokens] -1: the item computes the token's whole
                                     // context
  int32_t* slot_of_token = nullptr;  // [max_tokens] first slot; -1 if the token is not split
  float* partial = nullptr;          // [slots, PartialFloats() of the layer]
};

// AttentionWorkBytes() returns the size of one 16-byte aligned allocation; LayOutAttentionWork()
// places the work list in it. `row_floats` is the largest PartialFloats() of the model's layers;
// with 0, the allocation has no memory for partial results, and the caller sets `partial`.
int64_t AttentionWorkBytes(int max_tokens, int slots, int64_t row_floats);
AttentionWork LayOutAttentionWork(void* memory, int max_tokens, int slots);
// Returns the number of slots that a server should allocate for each work list: 8,192, enough for
// 32 contexts of 65,536 tokens in splits of 256; fewer if their partial results would take more
// than 192 MiB, as with many heads over latent vectors, but at least 512. `row_floats` is above 0.
int AttentionSlots(int64_t row_floats);
// Returns the number of floats of the partial results for one split of one token. `query_heads`:
// the number of heads in all query rows that a token may have; `head_dim`: widest_dim(), or
// latent_dim.
int64_t PartialFloats(int query_heads, int head_dim);

// Returns the number of tokens per split. It depends on the model's shape alone, so results do not
// depend on the batch. `group`: the number of query heads that share a kv head, over all query rows
// that a token has by the model's shape. It must not be computed from the rows that the tokens of a
// step have, because their number differs from step to step.
int SplitTokens(int group);
// Returns the largest number of splits that one token needs.
int MaxSplits(int max_context, const SeenKeys& seen, int split_tokens);

// Computes `work` for tokens [0, tokens) of the step.
void LaunchAttentionWork(const StepView& step, int tokens, const SeenKeys& seen, int split_tokens,
                         const AttentionWork& work, cudaStream_t stream);

// Whether attention over the layer's latent vectors uses the tensor cores: cache and output are
// bf16, and the vectors have at most 576 elements, of which at most 512 are values.
bool FitsLatentMma(const KvLayerView& cache, DType output_dtype);
// Whether LaunchAttention() needs no AttentionWork for the layer.
inline bool IsWide(const KvLayerView& cache, DType output_dtype) {
  return cache.latent_dim > 0 ? !FitsLatentMma(cache, output_dtype)
                              : cache.widest_dim() > kMaxTiledDim;
}

// The kernels that compute tokens [0, tiled_from) of a launch. All compute the same bits.
enum class AttentionSplits : uint8_t {
  kAuto,    // kMerged
  kMerged,  // splits by AttentionWork, and a launch that merges them
  // A cluster of this many blocks per token and kv head. Needs no AttentionWork.
  kCluster4,
  kCluster8,
  kCluster16,
};

// The names of the kernels, in the order of AttentionSplits.
inline constexpr std::string_view kAttentionSplitsNames[] = {"auto", "merged", "cluster4",
                                                             "cluster8", "cluster16"};

// The kernel that computes tiles of tokens over a bf16 or int8 cache with bf16 results. All have
// the same bits. A kernel that the device or the cache does not allow is replaced by the one before
// it. An int8 cache has kMma, which kAuto stands for, and kPingPong.
enum class AttentionTiles {
  kAuto,       // the choice of LaunchAttention()
  kMma,        // mma.sync
  kWarpgroup,  // wgmma, one warpgroup per block; compute capability 9.0
  kPingPong,   // wgmma, several warpgroups per block that take turns; padded_dim 64 or 128
};

// The names of the kernels, in the order of AttentionTiles.
inline constexpr std::string_view kAttentionTilesNames[] = {"auto", "mma", "warpgroup", "pingpong"};

// Computes output = softmax(scale * q . k) v over the cached positions that the row's token sees.
// The bits of a row depend neither on other rows nor on whether its token is below tiled_from. Rows
// of padding tokens become zeros.
//
// All arithmetic is f32, unless the cache is bf16 or int8 and the output bf16. In that case queries
// and softmax weights are rounded to bf16 for the tensor cores, which accumulate in f32. With an
// int8 cache, the weights are multiplied by the scales of their values before that.
struct AttentionLaunch {
  KvLayerView cache;
  StepView step;
  QueryRows rows;
  const float* query = nullptr;  // [Q, heads * head_dim]
  int64_t query_stride = 0;
  void* output = nullptr;  // [Q, heads * value_dim]
  int64_t output_stride = 0;
  DType output_dtype = DType::kF32;
  int heads = 0;            // heads of one query row; a multiple of the number of kv heads
  bool tile_order = false;  // true: head h reads kv head h % num_kv_heads; false: h / (heads /
                            // num_kv_heads)
  float scale = 1.0f;
  float soft_cap = 0.0f;         // above 0: scaled scores become SoftCap(score, soft_cap)
  const float* sinks = nullptr;  // [heads] one more score of each head's softmax; null: none
  // AttentionArgs::bias, added to scaled scores; null: none. Not with a soft cap, nor with latent
  // vectors.
  const float* bias = nullptr;
  int bias_distances = 0;
  SeenKeys seen;
  // Tokens [0, tiled_from) are computed one by one, with their contexts divided into splits by
  // `work`. Tokens from tiled_from on are computed in tiles of neighbouring tokens of one sequence.
  // The choice affects only the speed.
  int tiled_from = 0;
  // For the same seen keys and split size; unused if tiled_from is 0, or with clusters.
  AttentionWork work;
  AttentionSplits splits = AttentionSplits::kAuto;  // must be one that CanUseSplits() allows
  AttentionTiles tiles = AttentionTiles::kAuto;
  // If not null, in host memory: what LaunchNormRopeAppend() would do is done first, by the same
  // kernel; CanPrepare() must allow it. Its cache and step are those of the launch. With heads > 0,
  // the query rows are normalised and rotated when they are read and stay as they are in memory;
  // `prepare->query` is not used.
  const NormRopeAppendLaunch* prepare = nullptr;
};
// Returns whether LaunchAttention() can compute args.prepare: all tokens are single ones over a
// bf16 cache, and norms are those of heads.
bool CanPrepare(const AttentionLaunch& args);
// Returns whether LaunchAttention() can compute the launch with `splits` on the current device.
bool CanUseSplits(const AttentionLaunch& args, AttentionSplits splits);
void LaunchAttention(const AttentionLaunch& args, cudaStream_t stream);

// Returns the kernels that may be the fastest for the launch's tiles on the current device; the one
// that kAuto stands for is the first. Empty if tiles are not computed on the tensor cores.
std::span<const AttentionTiles> AttentionTilesThatFit(const AttentionLaunch& args);

}  // namespace moeserve::cuda

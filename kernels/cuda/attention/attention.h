// Attention of one step over the cache, on the device.
//
// All pointers are device pointers and all launches are asynchronous on `stream`. What changes from
// step to step is read on the device; launch shapes depend on the fields of these structs alone,
// so a captured launch may be replayed with other contents of the same arrays.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/attention/kv_layer_view.h"
#include "kernels/cuda/attention/step_view.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// The query rows of each token, as the arrays of a RoutingPlan; all null: row t is token t.
struct QueryRows {
  const int32_t* row_offsets = nullptr;         // [tokens + 1]
  const int32_t* assignments_of_row = nullptr;  // [A]
  const int32_t* row_of_assignment = nullptr;   // [A]
  int max_per_token = 1;                        // largest number of rows of one token
};

// How the contexts of a step's single tokens are cut into splits that run side by side. Laid out by
// LaunchAttentionWork once per step (and distinct window), read by LaunchAttention. The partial
// results are shared by all layers: launches of one stream use them one after another.
struct AttentionWork {
  int max_tokens = 0;  // tokens that item_* and slot_of_token have room for
  int slots = 0;       // splits that `partial` has room for; a token without room runs in one piece
  int32_t* item_count = nullptr;     // [1]
  int32_t* item_token = nullptr;     // [slots + max_tokens]
  int32_t* item_split = nullptr;     // [slots + max_tokens] -1: all splits of the token
  int32_t* slot_of_token = nullptr;  // [max_tokens] first slot; -1: the token runs in one piece
  float* partial = nullptr;          // [slots, PartialFloats(...) of the layer]
};

// Bytes of one allocation, 16 bytes aligned, and the work list laid out in it. `row_floats` is
// the largest PartialFloats of the model's layers.
int64_t AttentionWorkBytes(int max_tokens, int slots, int64_t row_floats);
AttentionWork LayOutAttentionWork(void* memory, int max_tokens, int slots);
// Floats of the partial results of one split of one token. `query_heads`: heads of all query rows
// that a token may have.
int64_t PartialFloats(int query_heads, int head_dim);

// Tokens of one split: a function of the model's shape alone, so results do not depend on the
// batch. `group`: query heads of one query row that share a kv head. It must not depend on the rows
// of a token, whose maximum differs from step to step.
int SplitTokens(int group);
// Splits that one token needs at most.
int MaxSplits(int max_context, int window, int split_tokens);

// Fills `work` for tokens [0, tokens) of the step.
void LaunchAttentionWork(const StepView& step, int tokens, int window, int split_tokens,
                         const AttentionWork& work, cudaStream_t stream);

// output = softmax(scale * q . k) v over the cached positions of the row's token, from
// position - window + 1 on where window > 0. The bits of a row do not depend on other rows or on
// the side of tiled_from its token is on. Rows of padding tokens become zeros.
//
// Arithmetic is f32 throughout, unless both the cache and the output are bf16: then queries and
// softmax weights are rounded to bf16 for the tensor cores, which accumulate in f32.
struct AttentionLaunch {
  KvLayerView cache;
  StepView step;
  QueryRows rows;
  const float* query = nullptr;  // [Q, heads * head_dim]
  int64_t query_stride = 0;
  void* output = nullptr;  // [Q, heads * head_dim]
  int64_t output_stride = 0;
  DType output_dtype = DType::kF32;
  int heads = 0;            // of one query row; a multiple of the kv heads
  bool tile_order = false;  // kv head of head h: h % num_kv_heads; else h / (heads / num_kv_heads)
  float scale = 1.0f;
  int window = 0;  // 0: none
  // Tokens [0, tiled_from) run one by one, their contexts split by `work`; tokens from there
  // on run in tiles of neighbours of one sequence. Affects speed only.
  int tiled_from = 0;
  AttentionWork work;  // of the same window and split size; unused where tiled_from is 0
};
void LaunchAttention(const AttentionLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda

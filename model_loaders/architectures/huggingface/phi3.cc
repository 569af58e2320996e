// Phi-3: fused query, key and value projections; fused gate and up projections.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kPhi3Tensors[] = {
    {.model = "blocks.*.attention.q.weight",
     .file = "model.layers.*.self_attn.qkv_proj.weight",
     .part = 0,
     .parts = 3,
     .order = RowOrder::kQkv},
    {.model = "blocks.*.attention.k.weight",
     .file = "model.layers.*.self_attn.qkv_proj.weight",
     .part = 1,
     .parts = 3,
     .order = RowOrder::kQkv},
    {.model = "blocks.*.attention.v.weight",
     .file = "model.layers.*.self_attn.qkv_proj.weight",
     .part = 2,
     .parts = 3,
     .order = RowOrder::kQkv},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight"},
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.mlp.gate_up_proj.weight", 0, 2},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mlp.gate_up_proj.weight", 1, 2},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.mlp.down_proj.weight"},
};

ConfigResult ReadPhi3(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 4096,
              .rms_norm_eps = 1e-5,
              .bos_token_id = 1,
              .eos_token_ids = {32000},
              .original_max_position_embeddings = 4096});
  c.Ignore({"original_max_position_embeddings"});
  AttentionSpec attention = c.Attention();
  attention.window = c.Window();
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  c.Tensors({EmbeddingTensors(), PreNormTensors(), kPhi3Tensors});
  return c.Finish(attention, dense);
}

}  // namespace

constinit const Architecture kPhi3Architecture = {.model_type = "phi3", .read = ReadPhi3};

}  // namespace moeserve

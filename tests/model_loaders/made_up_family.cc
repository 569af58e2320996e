#include "tests/model_loaders/made_up_family.h"

#include <cmath>
#include <memory>

#include "base/error_text.h"
#include "model_loaders/architectures/name_table.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kModelType = "made_up_moe";

constexpr TensorRule kTensors[] = {
    {"embed.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.norm.weight"},
    {"head.weight", "lm_head.weight"},
    {"blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"},
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.k.weight", "model.layers.*.self_attn.kv_proj.weight", 0, 2,
     RowOrder::kInterleaved},
    {"blocks.*.attention.v.weight", "model.layers.*.self_attn.kv_proj.weight", 1, 2,
     RowOrder::kInterleaved},
    {.model = "blocks.*.attention.o.weight",
     .file = "model.layers.*.self_attn.o_proj.weight",
     .transposed = true},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.post_attention_layernorm.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.block_sparse_moe.gate.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.block_sparse_moe.input_linear.weight", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.block_sparse_moe.input_linear.weight", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.block_sparse_moe.experts.*.w2.weight"},
};

constexpr KeyRule kKeys[] = {
    {"attention.num_heads", "num_attention_heads"},
    {"attention.num_kv_heads", "num_key_value_heads"},
    {"feed_forward.routing.num_experts", "num_local_experts"},
    {"feed_forward.routing.select.k", "num_experts_per_tok"},
    {"feed_forward.routing.widths", "intermediate_size"},
    {"num_experts", "num_local_experts"},
};

Result<std::unique_ptr<const CheckpointConfig>> ReadMadeUp(const Json& json,
                                                           const StoredNames& stored) {
  auto config = std::make_unique<NameTableConfig>(kTensors, kKeys, stored);
  config->ignored = {"model.layers.*.self_attn.rotary_emb.inv_freq"};
  ModelSpec& spec = config->spec;
  Problems problems;
  ObjectReader reader(json, "", &problems);
  spec.vocab_size = reader.Int("vocab_size");
  spec.hidden_size = reader.Int("hidden_size");
  spec.max_position_embeddings = reader.Int("max_position_embeddings");
  spec.bos_token_id = reader.Int("bos_token_id");
  if (const Json* eos = reader.Required("eos_token_id", kTokenIdsExpected)) {
    spec.eos_token_ids = ParseTokenIds(*eos, "eos_token_id", &problems);
  }
  spec.norm.eps = static_cast<float>(reader.Real("rms_norm_eps", 1e-5));
  spec.position.theta = reader.Real("rope_theta", 1e6);
  spec.embedding_scale = reader.Real("embedding_multiplier", 1.0);
  spec.tie_word_embeddings = reader.Bool("tie_word_embeddings", false);
  if (spec.tie_word_embeddings) config->ignored.push_back("lm_head.weight");

  LayerSpec layer;
  AttentionSpec& attention = layer.attention;
  attention.num_heads = reader.Int("num_attention_heads");
  attention.num_kv_heads = reader.Int("num_key_value_heads", attention.num_heads);
  attention.head_dim =
      reader.Int("head_dim", attention.num_heads > 0 ? spec.hidden_size / attention.num_heads : 0);
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  RoutedLayerSpec routing;
  routing.num_experts = reader.Int("num_local_experts");
  const int width = reader.Int("intermediate_size");
  routing.select.k = reader.Int("num_experts_per_tok", 2);
  routing.renormalize = true;
  const int layers = reader.Int("num_hidden_layers");
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kConfigFile));
  MOESERVE_RETURN_IF_ERROR(
      CheckListLengths({"num_hidden_layers", layers}, {"num_local_experts", routing.num_experts}));
  routing.widths.assign(static_cast<size_t>(routing.num_experts), width);
  layer.feed_forward.routing = std::move(routing);
  spec.AddLayers(layers, layer);
  MOESERVE_RETURN_IF_ERROR(ValidateConfig(*config));
  return config;
}

}  // namespace

constinit const Architecture kMadeUpArchitecture = {
    .model_type = kModelType,
    .recognizes = [](const Json& config) { return HasModelType(config, kModelType); },
    .read = ReadMadeUp};

}  // namespace moeserve::testing

// Families whose tokens attend to a number of keys that an indexer chooses: DeepSeek-V3.2 and
// GLM-5. As long as there are no more keys than that, the result is that of attention to all of
// them, so texts are limited to this length, and the indexer is not computed.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/latent_keys.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr std::string_view kIndexed[] = {"indexed_attention", "deepseek_sparse_attention"};
constexpr std::string_view kIndexers[] = {"full", "shared"};

ConfigResult ReadIndexed(const Json& json, const StoredNames& stored,
                         const DecoderDefaults& defaults, const LatentDefaults& latent,
                         const DeepSeekDefaults& router) {
  DecoderConfig c(json, stored);
  ObjectReader& keys = c.keys();
  c.Skeleton(defaults);
  AddLatentTensors(c);
  c.Require("moe_layer_freq", 1);
  const AttentionSpec attention = ReadLatentAttention(c, json, latent);
  if (attention.latent->query_rank < 1) {
    keys.Fault("q_lora_rank", "an integer above 0, of which the indexer's queries are made",
               json.contains("q_lora_rank") ? ShowJson(json["q_lora_rank"]) : "no such key");
  }
  c.Require("rope_interleave", true);
  FeedForwardSpec dense = c.Dense();
  c.Require("mlp_bias", false);
  const FeedForwardSpec experts = c.DeepSeekExperts({.count = "n_routed_experts"}, router);
  dense.expert.activation = experts.expert.activation;
  const std::vector<bool> sparse = c.SparseFrom(3);

  const int topk = keys.Int("index_topk", 2048);
  if (topk < 1) keys.Fault("index_topk", "an integer above 0", std::to_string(topk));
  c.LimitContext(topk, "sparse attention beyond index_topk is not computed");
  c.LayerNames("layer_types", kIndexed);
  c.LayerNames("indexer_types", kIndexers);
  c.Ignore({"index_head_dim", "index_n_heads", "index_topk_freq", "index_skip_topk_offset",
            "index_topk_pattern", "indexer_rope_interleave"});
  c.IgnoreTensors({"model.layers.*.self_attn.indexer.wq_b.weight",
                   "model.layers.*.self_attn.indexer.wk.weight",
                   "model.layers.*.self_attn.indexer.wq_b.weight_scale_inv",
                   "model.layers.*.self_attn.indexer.wk.weight_scale_inv",
                   "model.layers.*.self_attn.indexer.k_norm.weight",
                   "model.layers.*.self_attn.indexer.k_norm.bias",
                   "model.layers.*.self_attn.indexer.weights_proj.weight",
                   "model.layers.*.self_attn.indexer.weights_proj.weight_scale_inv"});
  c.NextTokenLayers(keys.Int("num_nextn_predict_layers", 1), {attention, experts});
  return c.Finish(attention, dense, experts, sparse);
}

ConfigResult ReadDeepSeekV32(const Json& json, const StoredNames& stored) {
  return ReadIndexed(
      json, stored,
      {.max_position_embeddings = 163840,
       .bos_token_id = 0,
       .eos_token_ids = {1},
       .num_key_value_heads = 128},
      {}, {.routed_scaling_factor = 2.5, .n_group = 8, .topk_group = 4, .n_shared_experts = 1});
}

ConfigResult ReadGlmMoeDsa(const Json& json, const StoredNames& stored) {
  return ReadIndexed(json, stored,
                     {.max_position_embeddings = 202752,
                      .rms_norm_eps = 1e-5,
                      .bos_token_id = 0,
                      .eos_token_ids = {1},
                      .num_key_value_heads = 64},
                     {.query_rank = 2048, .plain_dim = 192, .value_dim = 256},
                     {.routed_scaling_factor = 2.5, .n_shared_experts = 1});
}

}  // namespace

constinit const Architecture kDeepSeekV32Architecture = {.model_type = "deepseek_v32",
                                                         .read = ReadDeepSeekV32};

constinit const Architecture kGlmMoeDsaArchitecture = {.model_type = "glm_moe_dsa",
                                                       .read = ReadGlmMoeDsa};

}  // namespace moeserve

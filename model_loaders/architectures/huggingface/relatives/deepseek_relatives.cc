// Families that differ from DeepSeek-V3 in names and a few settings: GLM-4.7 Flash, Sarvam's models
// with latent attention, A.X K1.

#include <utility>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/latent_keys.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

void ReadInterleave(DecoderConfig& c) {
  if (!c.keys().Bool("rope_interleave", true)) c.spec().position.pairing = RopePairing::kHalf;
}

ConfigResult ReadGlm4MoeLite(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 202752,
              .rms_norm_eps = 1e-5,
              .bos_token_id = 0,
              .eos_token_ids = {1},
              .num_key_value_heads = 20});
  AddLatentTensors(c);
  const AttentionSpec attention =
      ReadLatentAttention(c, json, {.query_rank = 768, .plain_dim = 192, .value_dim = 256});
  ReadInterleave(c);
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts = c.DeepSeekExperts(
      {.count = "n_routed_experts"}, {.routed_scaling_factor = 1.8, .n_shared_experts = 1});
  dense.expert.activation = experts.expert.activation;
  const std::vector<bool> sparse = c.SparseFrom(1);
  c.NextTokenLayers(c.keys().Int("num_nextn_predict_layers", 1), {attention, experts});
  return c.Finish(attention, dense, experts, sparse);
}

// The authors call yarn by another name.
Json WithYarn(const Json& json) {
  Json config = json;
  if (!config.contains("rope_scaling") || !config["rope_scaling"].is_object()) return config;
  for (const char* key : {"type", "rope_type"}) {
    Json& rope = config["rope_scaling"];
    if (rope.contains(key) && rope[key] == "deepseek_yarn") rope[key] = "yarn";
  }
  return config;
}

ConfigResult ReadSarvamMla(const Json& json, const StoredNames& stored) {
  const Json config = WithYarn(json);
  DecoderConfig c(config, stored);
  c.Skeleton({.max_position_embeddings = 4096, .bos_token_id = 0, .eos_token_ids = {1}});
  AddLatentTensors(c);
  c.Require("moe_layer_freq", 1);
  const AttentionSpec attention = ReadLatentAttention(c, config, {.query_rank = 0});
  c.Ignore({"q_head_dim"});  // follows from other keys
  ReadInterleave(c);
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts =
      c.DeepSeekExperts({.count = "n_routed_experts"},
                        {.routed_scaling_factor = 2.5,
                         .n_shared_experts = 1,
                         .shared_key = c.FirstOf({"n_shared_experts", "num_shared_experts"})});
  dense.expert.activation = experts.expert.activation;
  const int first = c.keys().Int("first_k_dense_replace", 1);
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 0));
  return c.Finish(attention, dense, experts, first);
}

constexpr TensorRule kExpertsNorm[] = {
    {"blocks.*.feed_forward.output_norm.weight", "model.layers.*.post_mlp_layernorm.weight"},
    {"blocks.*.feed_forward.output_norm.weight", "model.layers.*.mlp.post_mlp_layernorm.weight"},
};

// In layers with experts, the output is normalised, too. Published files have no choice bias, and
// the norm also in the other layers.
ConfigResult ReadAxk1(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 32768,
              .bos_token_id = 163691,
              .eos_token_ids = {163691},
              .num_key_value_heads = 64});
  AddLatentTensors(c);
  c.Tensors(kExpertsNorm);
  c.IgnoreTensors(
      {"model.layers.*.post_mlp_layernorm.weight", "model.layers.*.mlp.post_mlp_layernorm.weight"});
  const AttentionSpec attention = ReadLatentAttention(c, json, {});
  ReadInterleave(c);
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.DeepSeekExperts(
      {.count = "n_routed_experts"},
      {.routed_scaling_factor = 2.5, .n_group = 8, .topk_group = 4, .n_shared_experts = 1});
  dense.expert.activation = experts.expert.activation;
  experts.routing->select.bias = c.StoresAny("model.layers.*.mlp.gate.e_score_correction_bias");
  const int first = c.keys().Int("first_k_dense_replace", 1);
  const int step = c.keys().Int("moe_layer_freq", 1);
  if (step < 1) c.keys().Fault("moe_layer_freq", "an integer >= 1", std::to_string(step));
  const std::vector<bool> sparse =
      c.SparseLayers([&](int layer) { return layer >= first && step > 0 && layer % step == 0; });
  return c.FinishBlocks([&](int layer) {
    const bool routed = sparse[static_cast<size_t>(layer)];
    BlockSpec feed_forward{.mixer = routed ? experts : dense};
    if (routed) feed_forward.residual.norm_placement = NormPlacement::kBoth;
    return std::vector<BlockSpec>{{.mixer = attention}, std::move(feed_forward)};
  });
}

}  // namespace

constinit const Architecture kGlm4MoeLiteArchitecture = {.model_type = "glm4_moe_lite",
                                                         .read = ReadGlm4MoeLite};

constinit const Architecture kSarvamMlaArchitecture = {.model_type = "sarvam_mla",
                                                       .read = ReadSarvamMla};

constinit const Architecture kAxk1Architecture = {.model_type = "axk1", .read = ReadAxk1};

}  // namespace moeserve

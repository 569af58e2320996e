// HunYuan MoE: queries and keys are normalised after their rotation.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kHunyuanTensors[] = {
    {"blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.query_layernorm.weight"},
    {"blocks.*.attention.k_norm.weight", "model.layers.*.self_attn.key_layernorm.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.gate.wg.weight"},
    {"blocks.*.feed_forward.shared.gate.weight", "model.layers.*.mlp.shared_mlp.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.mlp.shared_mlp.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "model.layers.*.mlp.shared_mlp.down_proj.weight"},
};

// Scaling of the type "dynamic" with the key "alpha" does not depend on the length of a text: it is
// another theta. Returns the configuration without such scaling, and the factor alpha in `alpha`.
Json WithoutAlpha(const Json& json, double* alpha) {
  Json rest = json;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto rope = rest.find(key);
    if (rope == rest.end() || !rope->is_object()) continue;
    const bool dynamic =
        rope->value("rope_type", Json()) == "dynamic" || rope->value("type", Json()) == "dynamic";
    const auto value = rope->find("alpha");
    if (!dynamic || value == rope->end() || !value->is_number()) continue;
    *alpha = value->get<double>();
    // Without effect for this type.
    for (const char* other :
         {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "type"}) {
      rope->erase(other);
    }
    (*rope)["rope_type"] = "default";
  }
  return rest;
}

ConfigResult ReadHunyuan(const Json& json, const StoredNames& stored) {
  double alpha = 0.0;
  const Json rest = WithoutAlpha(json, &alpha);
  DecoderConfig c(rest, stored);
  c.Skeleton({.rms_norm_eps = 1e-5});
  c.Tensors(
      {kHunyuanTensors, EmbeddingTensors(), PreNormTensors(), AttentionTensors(), ExpertTensors()});
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  attention.qk_norm_after_rope = true;
  if (alpha > 0.0 && attention.head_dim > 2) {
    const double dim = attention.head_dim;
    c.spec().position.theta *= std::pow(alpha, dim / (dim - 2.0));
  }
  FeedForwardSpec experts = c.WithActivation(
      c.Experts({.count = "num_experts", .width = "intermediate_size", .selected = "moe_topk"}));
  experts.routing->renormalize = true;
  experts.shared_width = c.keys().Int("intermediate_size");
  c.Ignore({"eod_token_id", "sep_token_id", "num_experts_per_tok", "num_local_experts"});
  return c.Finish(attention, experts);
}

}  // namespace

constinit const Architecture kHunYuanMoeArchitecture = {.model_type = "hunyuan_v1_moe",
                                                        .read = ReadHunyuan};

}  // namespace moeserve

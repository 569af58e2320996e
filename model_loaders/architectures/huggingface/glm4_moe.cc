// GLM-4.5 and the decoder of GLM-4.5V: sigmoid gates, a choice bias, groups of experts, shared
// experts.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

const DecoderDefaults kGlm4MoeDefaults{.max_position_embeddings = 131072,
                                       .rms_norm_eps = 1e-5,
                                       .bos_token_id = std::nullopt,
                                       .eos_token_ids = {},
                                       .partial_rotary_factor = 0.5,
                                       .num_key_value_heads = 8};

ConfigResult ReadGlm4Moe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(kGlm4MoeDefaults);
  AttentionSpec attention = c.Attention();
  attention.bias = c.keys().Bool("attention_bias", false);
  if (c.keys().Bool("use_qk_norm", false)) attention.qk_norm = QkNorm::kHead;
  const FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts =
      c.DeepSeekExperts({.count = "n_routed_experts"}, {.n_shared_experts = 1});
  const int first = c.keys().Int("first_k_dense_replace", 1);
  c.NextTokenLayers(c.keys().Int("num_nextn_predict_layers", 1), {attention, experts});
  c.Ignore({"num_mtp_layers"});
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             DenseTensors(), ExpertTensors(), SharedExpertTensors()});
  return c.Finish(attention, dense, experts, first);
}

// The decoder of GLM-4.5V.
ConfigResult ReadGlm4vMoeText(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  DecoderDefaults defaults = kGlm4MoeDefaults;
  defaults.max_position_embeddings = 65536;
  c.Skeleton(defaults);
  AttentionSpec attention = c.Attention();
  attention.bias = c.keys().Bool("attention_bias", true);
  c.Require("use_qk_norm", false);
  const FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts =
      c.DeepSeekExperts({.count = "n_routed_experts"}, {.n_shared_experts = 1});
  const int first = c.keys().Int("first_k_dense_replace", 1);
  c.NextTokenLayers(c.keys().Int("num_nextn_predict_layers", 1), {attention, experts});
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors()});
  return c.Finish(attention, dense, experts, first);
}

}  // namespace

constinit const Architecture kGlm4MoeArchitecture = {.model_type = "glm4_moe", .read = ReadGlm4Moe};

constinit const Architecture kGlm4vMoeTextArchitecture = {.model_type = "glm4v_moe_text",
                                                          .read = ReadGlm4vMoeText};

}  // namespace moeserve

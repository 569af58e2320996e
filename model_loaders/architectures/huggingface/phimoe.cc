// Phi-3.5-MoE: layer norms, a sparse mixer as gate, and a bias of the logits.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kPhimoeTensors[] = {
    {"norm.bias", "model.norm.bias"},
    {"head.bias", "lm_head.bias"},
    {"blocks.*.attention.norm.bias", "model.layers.*.input_layernorm.bias"},
    {"blocks.*.feed_forward.norm.bias", "model.layers.*.post_attention_layernorm.bias"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.weight"},
};

ConfigResult ReadPhiMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 1e6,
              .num_key_value_heads = 8});
  c.spec().norm.kind = NormKind::kLayer;
  c.spec().head_bias = c.keys().Bool("lm_head_bias", false);
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.window = c.Window();
  FeedForwardSpec experts =
      c.WithActivation(c.Experts({.count = "num_local_experts", .width = "intermediate_size"}));
  c.Require("num_experts_per_tok", 2);  // the family's code selects two, whatever the key says
  experts.routing->gate = GateKind::kSparseMixer;
  experts.routing->mixer_limit = 2.0 * c.keys().Real("router_jitter_noise", 0.01);
  // The first is noise of training; the second is repeated in the rotary parameters.
  c.Ignore({"input_jitter_noise", "original_max_position_embeddings"});
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), BlockSparseTensors(),
             kPhimoeTensors, ExpertTensors()});
  constexpr KeyRule kKeys[] = {{"head_bias", "lm_head_bias"},
                               {"feed_forward.routing.mixer_limit", "router_jitter_noise"}};
  c.Keys(kKeys);
  return c.Finish(attention, experts);
}

}  // namespace

constinit const Architecture kPhiMoeArchitecture = {.model_type = "phimoe", .read = ReadPhiMoe};

}  // namespace moeserve

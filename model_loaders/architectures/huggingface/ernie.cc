// ERNIE 4.5 (text), dense and with experts: interleaved rotary positions; experts are chosen by
// probability plus a bias.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// The choice bias is stored as [1, E].
constexpr TensorRule kRouter[] = {
    {.model = "blocks.*.feed_forward.router.choice_bias",
     .file = "model.layers.*.mlp.moe_statics.e_score_correction_bias",
     .wrapped = true},
    {.model = "blocks.*.feed_forward.router.choice_bias",
     .file = "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias",
     .wrapped = true},
};

void ReadSkeleton(DecoderConfig& c, int kv_heads) {
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 500000.0,
              .tie_word_embeddings = true,
              .num_key_value_heads = kv_heads});
  c.spec().position.pairing = RopePairing::kInterleaved;
}

ConfigResult ReadErnie(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  ReadSkeleton(c, 2);
  AttentionSpec attention = c.Attention(128);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  attention.bias = attention.out_bias = dense.expert.bias = c.keys().Bool("use_bias", false);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()});
  return c.Finish(attention, dense);
}

ConfigResult ReadErnieMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  ReadSkeleton(c, 4);
  AttentionSpec attention = c.Attention();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({.count = "moe_num_experts", .selected = "moe_k"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  c.Require("use_bias", false);
  c.Require("moe_use_aux_free", true);
  c.Require("moe_gate", "topk");
  experts.routing->renormalize = true;
  experts.routing->select.bias = true;
  experts.shared_width = c.SharedWidth("moe_num_shared_experts", 2);
  const int first = c.keys().Int("moe_layer_start_index", 1);
  const int last = c.keys().Int("moe_layer_end_index", -1);
  const int interval = c.keys().Int("moe_layer_interval", 1);
  if (interval < 1) {
    c.keys().Fault("moe_layer_interval", "an integer >= 1", std::to_string(interval));
  }
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 0));
  c.Ignore({"moe_norm_min", "moe_capacity", "moe_gate_act"});
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors(), kRouter});
  const int64_t end = last == -1 ? int64_t{c.layers()} - 1 : last;
  return c.Finish([&](int layer) {
    const bool routed = (layer + 1) % interval == 0 && layer >= first && layer <= end;
    return LayerSpec{attention, routed ? experts : dense};
  });
}

}  // namespace

constinit const Architecture kErnieArchitecture = {.model_type = "ernie4_5", .read = ReadErnie};

constinit const Architecture kErnieMoeArchitecture = {.model_type = "ernie4_5_moe",
                                                      .read = ReadErnieMoe};

}  // namespace moeserve

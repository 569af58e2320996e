// JetMoE ("JetMoE: Reaching Llama2 Performance with 0.1M Dollars"): MoA attention and a routed
// feed-forward.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kJetMoeTensors[] = {
    {"blocks.*.attention.k.weight", "model.layers.*.self_attention.kv_proj.weight", 0, 2},
    {"blocks.*.attention.v.weight", "model.layers.*.self_attention.kv_proj.weight", 1, 2},
    {"blocks.*.attention.experts.*.q.weight",
     "model.layers.*.self_attention.experts.input_linear.weight"},
    {"blocks.*.attention.experts.*.o.weight",
     "model.layers.*.self_attention.experts.output_linear.weight"},
    {"blocks.*.attention.router.weight",
     "model.layers.*.self_attention.experts.router.layer.weight"},
    {"blocks.*.attention.out_bias", "model.layers.*.self_attention.experts.bias"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.layer.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "model.layers.*.mlp.input_linear.weight", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.mlp.input_linear.weight", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.mlp.output_linear.weight"},
    {"blocks.*.feed_forward.out_bias", "model.layers.*.mlp.bias"},
};

constexpr KeyRule kJetMoeKeys[] = {
    {"attention.routing.num_experts", "num_local_experts"},
    {"attention.routing.select.k", "num_experts_per_tok"},
    {"attention.head_dim", "kv_channels"},
};

// Returns the older name of a key if only that name is there.
std::string_view NameOfJetMoe(const Json& json, std::string_view key, std::string_view older) {
  return json.contains(older) && !json.contains(key) ? older : key;
}

ConfigResult ReadJetMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 4096, .tie_word_embeddings = true});
  // Only the final norm reads "rms_norm_eps".
  c.spec().norm.final_eps = c.spec().norm.eps;
  c.spec().norm.eps = 1e-6f;

  FeedForwardSpec experts =
      c.Experts({.count = NameOfJetMoe(json, "num_local_experts", "moe_num_experts"),
                 .width = NameOfJetMoe(json, "intermediate_size", "ffn_hidden_size"),
                 .selected = NameOfJetMoe(json, "num_experts_per_tok", "moe_top_k")});
  experts.expert.activation = c.Activation("activation_function");
  experts.routing->gate = GateKind::kSoftmaxSelected;
  experts.out_bias = true;

  AttentionSpec attention;
  attention.num_kv_heads = c.keys().Int("num_key_value_heads");
  attention.head_dim = c.keys().Int("kv_channels", 128);
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  attention.out_bias = true;
  RoutedLayerSpec of_attention = *experts.routing;
  of_attention.widths.clear();
  attention.routing = std::move(of_attention);

  c.Ignore({"num_attention_heads", "aux_loss_coef", "num_layers", "head_dim", "rotary_percent",
            "hidden_act"});
  c.Require("bias", true);
  c.Require("glu", true);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), kJetMoeTensors});
  c.Keys(kJetMoeKeys);
  return c.Finish(attention, experts);
}

}  // namespace

constinit const Architecture kJetMoeArchitecture = {.model_type = "jetmoe", .read = ReadJetMoe};

}  // namespace moeserve

// Dynamic_MoE ("Harder Tasks Need More Experts"): top-p selection without renormalisation.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kDynamicMoeTensors[] = {
    {"blocks.*.attention.norm.weight", "model.layers.*.input_norm.weight"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.post_attention_norm.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.weight"},
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.mlp.mlp.gate_proj.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mlp.mlp.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.mlp.mlp.down_proj.weight"},
};

constexpr KeyRule kDynamicMoeKeys[] = {{"feed_forward.routing.select.p", "top_p_threshold"}};

ConfigResult ReadDynamicMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  // The published code computes with these values whatever the file says.
  c.spec().position = {};
  AttentionSpec attention = c.Attention();
  attention.num_kv_heads = attention.num_heads;
  FeedForwardSpec dense = c.Dense();
  const int width = dense.width;
  const int frequency = c.keys().Int("expert_frequency", 2);
  if (frequency < 1) {
    c.keys().Fault("expert_frequency", "an integer >= 1", std::to_string(frequency));
  }
  FeedForwardSpec experts = c.Experts({.width = "intermediate_size", .selected = "num_experts"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  dense.width = width;
  SelectSpec& select = experts.routing->select;
  select.kind = SelectKind::kTopP;
  select.p = c.keys().Real("top_p_threshold", 0.4);
  select.compare = TopPCompare::kGt;
  select.max_experts = experts.routing->num_experts;
  c.Ignore({"experts_topk", "expert_type"});
  c.Require("attention_bias", false);
  c.Require("mlp_bias", false);
  c.Tensors({EmbeddingTensors(), AttentionTensors(), ExpertTensors(), kDynamicMoeTensors});
  c.Keys(kDynamicMoeKeys);
  return c.Finish([&](int layer) {
    return LayerSpec{attention, layer % frequency == 0 ? experts : dense};
  });
}

}  // namespace

// These files call themselves "llama".
constinit const Architecture kDynamicMoeArchitecture = {
    .model_type = "llama with top_p_threshold",
    .recognizes =
        [](const Json& config) {
          return HasModelType(config, "llama") && config.contains("top_p_threshold");
        },
    .read = ReadDynamicMoe};

}  // namespace moeserve

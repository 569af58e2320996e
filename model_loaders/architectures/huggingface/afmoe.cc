// AFMoE: gated attention, windows with rotary positions beside whole contexts without positions.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kAfmoeTensors[] = {
    {"blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"},
    {"blocks.*.attention.output_norm.weight", "model.layers.*.post_attention_layernorm.weight"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.pre_mlp_layernorm.weight"},
    {"blocks.*.feed_forward.output_norm.weight", "model.layers.*.post_mlp_layernorm.weight"},
    {"blocks.*.attention.gate.weight", "model.layers.*.self_attn.gate_proj.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.gate.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.expert_bias"},
};

ConfigResult ReadAfmoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 16384,
              .rms_norm_eps = 1e-5,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {}});
  c.Tensors({kAfmoeTensors, EmbeddingTensors(), AttentionTensors(), QkNormTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors()});
  ObjectReader& keys = c.keys();
  ModelSpec& spec = c.spec();
  spec.norm.placement = NormPlacement::kBoth;
  if (keys.Bool("mup_enabled", false) && spec.hidden_size > 0) {
    spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden_size));
  }
  AttentionSpec attention = c.Attention(128);
  attention.qk_norm = QkNorm::kHead;
  attention.gate = true;
  // The bias of the output projection would be added before the output's norm.
  c.Require("attention_bias", false);
  const int window = c.Window().value_or(1024);
  const int period = keys.Int("global_attn_every_n_layers", 4);
  const std::vector<bool> sliding =
      c.SlidingLayers([&](int layer) { return period > 0 && (layer + 1) % period != 0; });
  PositionSpec none;
  none.kind = PositionKind::kNone;

  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  RoutedLayerSpec& routing = *experts.routing;
  dense.expert.activation = experts.expert.activation = c.Activation();
  routing.gate = GateKind::kSigmoid;
  routing.renormalize = true;
  routing.scale = keys.Real("route_scale", 1.0);
  routing.select.bias = true;
  experts.shared_width = c.SharedWidth("num_shared_experts", 2);
  // The authors' files also have these keys.
  c.Require("score_func", "sigmoid");
  c.Require("route_norm", true);
  for (const char* key : {"n_group", "topk_group", "num_expert_groups", "num_limited_groups"}) {
    c.Require(key, 1);
  }
  c.Ignore({"load_balance_coeff", "use_grouped_mm"});
  const int first = keys.Int("num_dense_layers", 1);
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) {
      own.window = window;
    } else {
      own.position = none;
    }
    return LayerSpec{own, layer >= first ? experts : dense};
  });
}

}  // namespace

constinit const Architecture kAfmoeArchitecture = {.model_type = "afmoe", .read = ReadAfmoe};

}  // namespace moeserve

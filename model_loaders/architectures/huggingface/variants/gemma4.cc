// Gemma 4 (text): values are normalised, layers that see all positions have wider heads and may
// make values from the keys, and experts run beside a dense branch. In E2B and E4B, layers have
// inputs of their own, and the last ones read the keys and values of others.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kGemma4Layers[] = {
    {"blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"},
    {"blocks.*.attention.output_norm.weight", "model.layers.*.post_attention_layernorm.weight"},
    {"blocks.*.feed_forward.output_norm.weight",
     "model.layers.*.post_feedforward_layernorm.weight"},
    {"blocks.*.scale", "model.layers.*.layer_scalar"},
};

constexpr TensorRule kGemma4Inputs[] = {
    {"embed_layers.weight", "model.embed_tokens_per_layer.weight"},
    {"layer_input.weight", "model.per_layer_model_projection.weight"},
    {"layer_input.norm.weight", "model.per_layer_projection_norm.weight"},
    {"blocks.*.input.gate.weight", "model.layers.*.per_layer_input_gate.weight"},
    {"blocks.*.input.down.weight", "model.layers.*.per_layer_projection.weight"},
    {"blocks.*.input.norm.weight", "model.layers.*.post_per_layer_input_norm.weight"},
};

constexpr TensorRule kGemma4Dense[] = {
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.pre_feedforward_layernorm.weight"},
};

// The dense branch is the shared expert.
constexpr TensorRule kGemma4Experts[] = {
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.pre_feedforward_layernorm_2.weight"},
    {"blocks.*.feed_forward.experts_norm.weight",
     "model.layers.*.post_feedforward_layernorm_2.weight"},
    {"blocks.*.feed_forward.shared_norm.weight", "model.layers.*.pre_feedforward_layernorm.weight"},
    {"blocks.*.feed_forward.shared_output_norm.weight",
     "model.layers.*.post_feedforward_layernorm_1.weight"},
    {"blocks.*.feed_forward.shared.gate.weight", "model.layers.*.mlp.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.mlp.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "model.layers.*.mlp.down_proj.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.router.proj.weight"},
    {"blocks.*.feed_forward.router.norm.weight", "model.layers.*.router.scale"},
    {"blocks.*.feed_forward.router.expert_scale", "model.layers.*.router.per_expert_scale"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "model.layers.*.experts.gate_up_proj", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.experts.gate_up_proj", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.experts.down_proj"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "model.layers.*.experts.*.gate_proj.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.experts.*.up_proj.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.experts.*.down_proj.weight"},
};

// Reads rotary parameters, which may be of the type "proportional": a part of the pairs of the
// whole head is rotated, with the frequencies of the whole head.
PositionSpec ReadProportional(DecoderConfig& c, const Json& json, const std::string& path,
                              double theta, int head_dim) {
  const auto type = json.is_object() ? json.find("rope_type") : json.end();
  if (type == json.end() || *type != "proportional") return c.RopeFrom(json, path, theta);
  Json rest = json;
  const auto factor = rest.find("factor");
  rest["rope_type"] = factor == rest.end() || factor->is_null() ? "default" : "linear";
  PositionSpec position = c.RopeFrom(rest, path, theta);
  const double rotated = std::floor(position.fraction * head_dim / 2);
  if (head_dim > 0) position.fraction = 2 * rotated / head_dim;
  position.span = position.frequencies = RopeSpan::kHead;
  return position;
}

FeedForwardSpec ReadGemma4Experts(DecoderConfig& c, const FeedForwardSpec& dense) {
  FeedForwardSpec experts = c.Experts({.selected = "top_k_experts"});
  experts.expert = dense.expert;
  experts.shared_width = dense.width;
  experts.shared_norms = true;
  RoutedLayerSpec& routing = *experts.routing;
  routing.score.stream = true;
  routing.score.norm = RowNorm::kRmsWeight;
  if (c.spec().hidden_size > 0) routing.score.row_scale = 1.0 / std::sqrt(c.spec().hidden_size);
  routing.renormalize = true;
  routing.expert_scale = true;
  constexpr KeyRule kRules[] = {{"feed_forward.shared_width", "intermediate_size"}};
  c.Keys(kRules);
  return experts;
}

// Returns the widths of heads and their number in each layer.
std::vector<AttentionSpec> HeadsOfLayers(DecoderConfig& c, const AttentionSpec& attention,
                                         const std::vector<bool>& sliding, bool from_key) {
  const bool listed = c.keys().Optional("per_layer_config") != nullptr;
  const std::vector<LayerOverrides> overrides = PerLayerConfig(c);
  const int head_dim = c.keys().Int("global_head_dim", 512);
  const int kv_heads = c.keys().Int("num_global_key_value_heads", attention.num_kv_heads);
  std::vector<AttentionSpec> layers;
  for (size_t i = 0; i < sliding.size(); ++i) {
    AttentionSpec own = attention;
    if (!sliding[i] && !listed) {
      own.head_dim = head_dim;
      if (from_key) own.num_kv_heads = kv_heads;
    }
    if (i < overrides.size()) overrides[i].Apply(own);
    layers.push_back(own);
  }
  return layers;
}

// Reads the inputs of each layer.
void ReadLayerInputs(DecoderConfig& c, ActivationKind activation) {
  constexpr std::string_view kWidth = "hidden_size_per_layer_input";
  ModelSpec& spec = c.spec();
  const int width = c.keys().Int(kWidth, c.IsNull(kWidth) ? 0 : 256);
  const int rows = c.keys().Int("vocab_size_per_layer_input", 262144);
  constexpr KeyRule kRules[] = {{"layer_input.width", kWidth}, {"layer_input", kWidth}};
  c.Keys(kRules);
  c.Tensors(kGemma4Inputs);
  if (width == 0) return;
  if (rows != spec.vocab_size) {
    c.keys().Fault("vocab_size_per_layer_input", Concat(spec.vocab_size, " (vocab_size)"),
                   std::to_string(rows));
  }
  LayerInputSpec& input = spec.layer_input.emplace();
  input.width = width;
  input.activation = activation;
  input.token_scale = std::sqrt(std::max(width, 0));
  if (spec.hidden_size > 0) input.projection_scale = 1.0 / std::sqrt(spec.hidden_size);
  input.scale = std::sqrt(0.5);
}

// The last layers read the keys and values of the last layer of their type before them.
void ShareKeys(DecoderConfig& c, const std::vector<bool>& sliding,
               std::vector<AttentionSpec>& layers) {
  constexpr std::string_view kShared = "num_kv_shared_layers";
  const int count = static_cast<int>(layers.size());
  const int shared = c.keys().Int(kShared, 0);
  if (shared < 0 || shared > std::max(count - 1, 0)) {
    c.keys().Fault(kShared, Concat("an integer in [0, ", std::max(count - 1, 0), ']'),
                   std::to_string(shared));
    return;
  }
  const int first = count - shared;
  for (int i = first; i < count; ++i) {
    int from = first - 1;
    while (from >= 0 && sliding[static_cast<size_t>(from)] != sliding[static_cast<size_t>(i)]) {
      --from;
    }
    if (from < 0) {
      c.keys().Fault(kShared, Concat("a layer of the type of layer ", i, " before them"),
                     std::to_string(shared));
      return;
    }
    AttentionSpec& own = layers[static_cast<size_t>(i)];
    own.kv_layer = from;
    own.value_norm = own.value_from_key = false;
    // Files of some versions have the tensors, which are not used.
    for (const char* part : {"k_proj", "v_proj", "k_norm", "v_norm"}) {
      c.IgnorePrefix(Concat("model.layers.", i, ".self_attn.", part, '.'));
    }
  }
  constexpr KeyRule kRules[] = {{"attention.kv_layer", kShared}};
  c.Keys(kRules);
}

ConfigResult ReadGemma4(const Json& json, const StoredNames& stored) {
  constexpr double kFullTheta = 1e6, kSlidingTheta = 1e4;
  constexpr double kFullFraction = 0.25;
  Json rest = json;
  const auto parameters = json.find("rope_parameters");
  const bool of_layers = parameters != json.end() && DecoderConfig::IsRopeOfLayers(*parameters);
  if (of_layers) rest.erase("rope_parameters");
  DecoderConfig c(rest, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .tie_word_embeddings = true,
              .bos_token_id = 2,
              .eos_token_ids = {1},
              .num_key_value_heads = 4});
  c.Require("rope_parameters", nullptr);
  ModelSpec& spec = c.spec();
  if (spec.hidden_size > 0) spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden_size));
  spec.norm.placement = NormPlacement::kBoth;
  spec.layer_scale = true;
  spec.logit_soft_cap = c.Cap("final_logit_softcapping", 0.0);
  c.Require("attention_bias", false);  // that of the outputs would be added before their norm
  c.Require("use_bidirectional_attention", "vision");
  const bool double_wide = c.keys().Bool("use_double_wide_mlp", false);

  AttentionSpec attention = c.Attention(256);
  attention.scale = 1.0;
  attention.qk_norm = QkNorm::kHead;
  attention.value_norm = true;
  const bool from_key = c.keys().Bool("attention_k_eq_v", false);
  std::vector<bool> sliding = c.SlidingLayers([](int layer) { return (layer + 1) % 6 != 0; });
  if (!sliding.empty()) sliding.back() = false;  // whatever the list says
  std::vector<AttentionSpec> layers = HeadsOfLayers(c, attention, sliding, from_key);
  const int window = c.Window(512).value_or(512);

  const int full_dim = layers.empty() ? attention.head_dim : layers.back().head_dim;
  const Json full = of_layers && parameters->contains("full_attention")
                        ? (*parameters)["full_attention"]
                        : Json{{"rope_type", "proportional"},
                               {"rope_theta", kFullTheta},
                               {"partial_rotary_factor", kFullFraction}};
  spec.position = ReadProportional(c, full, "rope_parameters.full_attention", kFullTheta, full_dim);
  PositionSpec local;
  local.theta = kSlidingTheta;
  if (of_layers && parameters->contains("sliding_attention")) {
    local =
        ReadProportional(c, (*parameters)["sliding_attention"], "rope_parameters.sliding_attention",
                         kSlidingTheta, attention.head_dim);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].value_from_key = from_key && !sliding[i];
    if (!sliding[i]) continue;
    layers[i].window = window;
    layers[i].position = local;
  }
  ShareKeys(c, sliding, layers);

  FeedForwardSpec dense = c.Dense();
  dense.expert.activation = c.Activation("hidden_activation", "gelu_pytorch_tanh");
  const bool routed = c.keys().Bool("enable_moe_block", false);
  const FeedForwardSpec feed_forward = routed ? ReadGemma4Experts(c, dense) : dense;
  ReadLayerInputs(c, dense.expert.activation);
  if (!routed) c.Ignore({"num_experts", "top_k_experts", "moe_intermediate_size"});
  c.Tensors({kGemma4Layers, EmbeddingTensors(), AttentionTensors(), QkNormTensors()});
  if (routed) {
    c.Tensors(kGemma4Experts);
  } else {
    c.Tensors({kGemma4Dense, DenseTensors()});
  }
  return c.Finish([&](int layer) {
    const AttentionSpec& own = layers[static_cast<size_t>(layer)];
    LayerSpec of_layer{own, feed_forward};
    if (double_wide && own.kv_layer.has_value()) {
      FeedForwardSpec& wide = of_layer.feed_forward;
      int& width = routed ? wide.shared_width : wide.width;
      if (width <= kMaxWidth) width *= 2;  // a larger one is refused
    }
    return of_layer;
  });
}

}  // namespace

constinit const Architecture kGemma4Architecture = {.model_type = "gemma4_text",
                                                    .read = ReadGemma4};

}  // namespace moeserve

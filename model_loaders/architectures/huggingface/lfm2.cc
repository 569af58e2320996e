// LFM2 and LFM2-MoE: most layers have gated short convolutions instead of attention.

#include <algorithm>
#include <cmath>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kLfm2Tensors[] = {
    {"embed.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.embedding_norm.weight"},
    {"head.weight", "lm_head.weight"},
    {"blocks.*.attention.norm.weight", "model.layers.*.operator_norm.weight"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.ffn_norm.weight"},
    {"blocks.*.attention.b.weight", "model.layers.*.conv.in_proj.weight", 0, 3},
    {"blocks.*.attention.c.weight", "model.layers.*.conv.in_proj.weight", 1, 3},
    {"blocks.*.attention.x.weight", "model.layers.*.conv.in_proj.weight", 2, 3},
    {"blocks.*.attention.b.bias", "model.layers.*.conv.in_proj.bias", 0, 3},
    {"blocks.*.attention.c.bias", "model.layers.*.conv.in_proj.bias", 1, 3},
    {"blocks.*.attention.x.bias", "model.layers.*.conv.in_proj.bias", 2, 3},
    {.model = "blocks.*.attention.conv.weight",
     .file = "model.layers.*.conv.conv.weight",
     .channel = true},
    {"blocks.*.attention.conv.bias", "model.layers.*.conv.conv.bias"},
    {"blocks.*.attention.o.weight", "model.layers.*.conv.out_proj.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.out_proj.weight"},
    {"blocks.*.attention.o.bias", "model.layers.*.conv.out_proj.bias"},
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight"},
    {"blocks.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight"},
    {"blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_layernorm.weight"},
    {"blocks.*.attention.k_norm.weight", "model.layers.*.self_attn.k_layernorm.weight"},
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.feed_forward.w1.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.feed_forward.w3.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.feed_forward.w2.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.feed_forward.gate.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.feed_forward.expert_bias"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.feed_forward.experts.*.w1.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.feed_forward.experts.*.w3.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.feed_forward.experts.*.w2.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.feed_forward.experts.gate_up_proj", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.feed_forward.experts.gate_up_proj", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.feed_forward.experts.down_proj"},
};

// Reads what both families have, apart from the feed-forwards.
void ReadSkeleton(DecoderConfig& c) {
  c.Skeleton({.max_position_embeddings = 128000,
              .norm_eps_key = "norm_eps",
              .rms_norm_eps = 1e-5,
              .rope_theta = 1e6,
              .tie_word_embeddings = true,
              .num_key_value_heads = 8});
  c.Tensors(kLfm2Tensors);
  c.spec().tie_word_embeddings = c.keys().Bool("tie_embedding", c.spec().tie_word_embeddings);
}

// Returns which layers have attention: those of "layer_types", else those of "full_attn_idxs", else
// all. The first key is `required` in files of LFM2-MoE.
std::vector<bool> AttentionLayers(DecoderConfig& c, bool required) {
  std::vector<bool> attention(static_cast<size_t>(std::max(c.layers(), 0)), true);
  const std::string expected = Concat("a list of ", c.layers(), " strings");
  const Json* const indices = c.keys().Optional("full_attn_idxs");
  const Json* const types =
      required ? c.keys().Required("layer_types", expected) : c.keys().Optional("layer_types");
  if (types != nullptr) {
    if (!types->is_array() || types->size() != attention.size()) {
      c.keys().Fault("layer_types", expected, ShowJson(*types));
      return attention;
    }
    for (size_t i = 0; i < types->size(); ++i) {
      const Json& type = (*types)[i];
      attention[i] = type == "full_attention";
      if (!attention[i] && type != "conv") {
        c.keys().Fault(Concat("layer_types[", i, ']'), "\"full_attention\" or \"conv\"",
                       ShowJson(type));
      }
    }
  } else if (indices != nullptr) {
    attention.assign(attention.size(), false);
    for (const Json& index : *indices) {
      const int layer = IntFrom(index).value_or(-1);
      if (layer < 0 || layer >= c.layers()) {
        c.keys().Fault("full_attn_idxs", Concat("a list of integers in [0, ", c.layers() - 1, ']'),
                       ShowJson(*indices));
        break;
      }
      attention[static_cast<size_t>(layer)] = true;
    }
  }
  return attention;
}

// Reads the layers and builds the configuration. `feed_forward` returns that of a layer.
ConfigResult FinishLfm2(DecoderConfig& c, bool layer_types,
                        const std::function<const FeedForwardSpec&(int)>& feed_forward) {
  AttentionSpec attention = c.Attention();
  attention.qk_norm = QkNorm::kHead;
  ShortConvolutionSpec convolution;
  convolution.taps = c.keys().Int("conv_L_cache", 3);
  convolution.bias = c.keys().Bool("conv_bias", false);
  const std::vector<bool> is_attention = AttentionLayers(c, layer_types);
  c.Ignore({"block_use_swiglu", "block_norm_eps", "conv_dim", "conv_dim_out", "block_dim",
            "conv_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale",
            "block_use_xavier_init", "num_heads", "use_pos_enc"});
  constexpr KeyRule kRules[] = {{"attention.conv", "conv_L_cache"},
                                {"attention.bias", "conv_bias"}};
  c.Keys(kRules);
  return c.Finish([&](int layer) {
    LayerSpec own;
    own.attention = attention;
    if (!is_attention[static_cast<size_t>(layer)]) own.token_mixer = convolution;
    own.feed_forward = feed_forward(layer);
    return own;
  });
}

// Returns the width that the class makes of the one in the file.
int AdjustedWidth(DecoderConfig& c, int width) {
  const bool adjust = c.keys().Bool("block_auto_adjust_ff_dim", true);
  const double factor = c.keys().Real("block_ffn_dim_multiplier", 1.0);
  const int multiple = c.keys().Int("block_multiple_of", 256);
  if (!adjust) return width;
  const double scaled = factor * std::floor(2.0 * width / 3.0);
  if (multiple < 1 || !(scaled >= 1.0) || scaled > kMaxWidth) {
    c.keys().Fault("block_multiple_of", Concat("a width of 1 to ", kMaxWidth),
                   Concat(multiple, " (block_ff_dim is ", width, ')'));
    return width;
  }
  const auto whole = static_cast<int64_t>(scaled);
  return static_cast<int>((whole + multiple - 1) / multiple * multiple);
}

ConfigResult ReadLfm2(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  ReadSkeleton(c);
  const bool old_key = json.is_object() && json.contains("block_ff_dim");
  if (old_key) c.keys().Optional("intermediate_size");
  FeedForwardSpec dense = c.Dense(old_key ? "block_ff_dim" : "intermediate_size");
  dense.width = AdjustedWidth(c, dense.width);
  return FinishLfm2(c, false, [&](int) -> const FeedForwardSpec& { return dense; });
}

ConfigResult ReadLfm2Moe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  ReadSkeleton(c);
  const FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  RoutedLayerSpec& routing = *experts.routing;
  routing.gate = GateKind::kSigmoid;
  routing.select.bias = c.keys().Bool("use_expert_bias", true);
  routing.renormalize = c.keys().Bool("norm_topk_prob", true);
  routing.scale = c.keys().Real("routed_scaling_factor", 1.0);
  constexpr KeyRule kRules[] = {{"feed_forward.routing.scale", "routed_scaling_factor"},
                                {"feed_forward.routing.select.bias", "use_expert_bias"}};
  c.Keys(kRules);
  const int first = c.keys().Int("num_dense_layers", 2);
  return FinishLfm2(c, true, [&](int layer) -> const FeedForwardSpec& {
    return layer >= first ? experts : dense;
  });
}

}  // namespace

constinit const Architecture kLfm2Architecture = {.model_type = "lfm2", .read = ReadLfm2};

constinit const Architecture kLfm2MoeArchitecture = {.model_type = "lfm2_moe", .read = ReadLfm2Moe};

}  // namespace moeserve

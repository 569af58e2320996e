// Qwen3-Next and Qwen3.5: three of four layers are linear attention with a gated delta rule, the
// others attention with an output gate.

#include <algorithm>
#include <functional>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule Section(std::string_view model, std::string_view file, RowOrder order,
                             int part) {
  return {.model = model, .file = file, .part = part, .order = order};
}
constexpr TensorRule ConvolutionOf(std::string_view model, int part) {
  return {.model = model,
          .file = "model.layers.*.linear_attn.conv1d.weight",
          .part = part,
          .order = RowOrder::kDelta,
          .channel = true};
}

constexpr TensorRule kGatedAttention[] = {
    Section("blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight",
            RowOrder::kGatedQueries, 0),
    Section("blocks.*.attention.gate.weight", "model.layers.*.self_attn.q_proj.weight",
            RowOrder::kGatedQueries, 1),
    Section("blocks.*.attention.q.bias", "model.layers.*.self_attn.q_proj.bias",
            RowOrder::kGatedQueries, 0),
    Section("blocks.*.attention.gate.bias", "model.layers.*.self_attn.q_proj.bias",
            RowOrder::kGatedQueries, 1),
};

constexpr TensorRule kQwenDelta[] = {
    // Qwen3-Next joins the rows of each key head.
    Section("blocks.*.attention.q.weight", "model.layers.*.linear_attn.in_proj_qkvz.weight",
            RowOrder::kDeltaGroups, 0),
    Section("blocks.*.attention.k.weight", "model.layers.*.linear_attn.in_proj_qkvz.weight",
            RowOrder::kDeltaGroups, 1),
    Section("blocks.*.attention.v.weight", "model.layers.*.linear_attn.in_proj_qkvz.weight",
            RowOrder::kDeltaGroups, 2),
    Section("blocks.*.attention.gate.weight", "model.layers.*.linear_attn.in_proj_qkvz.weight",
            RowOrder::kDeltaGroups, 3),
    Section("blocks.*.attention.beta.weight", "model.layers.*.linear_attn.in_proj_ba.weight",
            RowOrder::kDeltaPairs, 0),
    Section("blocks.*.attention.decay.weight", "model.layers.*.linear_attn.in_proj_ba.weight",
            RowOrder::kDeltaPairs, 1),
    // Qwen3.5 does not.
    Section("blocks.*.attention.q.weight", "model.layers.*.linear_attn.in_proj_qkv.weight",
            RowOrder::kDelta, 0),
    Section("blocks.*.attention.k.weight", "model.layers.*.linear_attn.in_proj_qkv.weight",
            RowOrder::kDelta, 1),
    Section("blocks.*.attention.v.weight", "model.layers.*.linear_attn.in_proj_qkv.weight",
            RowOrder::kDelta, 2),
    {"blocks.*.attention.gate.weight", "model.layers.*.linear_attn.in_proj_z.weight"},
    {"blocks.*.attention.beta.weight", "model.layers.*.linear_attn.in_proj_b.weight"},
    {"blocks.*.attention.decay.weight", "model.layers.*.linear_attn.in_proj_a.weight"},
    ConvolutionOf("blocks.*.attention.q_conv.weight", 0),
    ConvolutionOf("blocks.*.attention.k_conv.weight", 1),
    ConvolutionOf("blocks.*.attention.v_conv.weight", 2),
    {"blocks.*.attention.decay_log", "model.layers.*.linear_attn.A_log"},
    {"blocks.*.attention.decay_bias", "model.layers.*.linear_attn.dt_bias"},
    {"blocks.*.attention.out_norm.weight", "model.layers.*.linear_attn.norm.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.linear_attn.out_proj.weight"},
};

constexpr TensorRule Unit(std::string_view model, std::string_view file) {
  return {.model = model, .file = file, .add = 1.0f};
}
constexpr TensorRule kQwenPrediction[] = {
    Unit("blocks.*.prediction.embed_norm.weight", "model.layers.*.pre_fc_norm_embedding.weight"),
    Unit("blocks.*.prediction.hidden_norm.weight", "model.layers.*.pre_fc_norm_hidden.weight"),
    {"blocks.*.prediction.join.weight", "model.layers.*.fc.weight"},
    Unit("blocks.*.prediction.norm.weight", "model.layers.*.norm.weight"),
};

struct QwenMixers {
  AttentionSpec attention;
  std::vector<LayerSpec> layers;
};

// Reads the sizes, the attention and the delta rule. Returns the attention, and the mixer of each
// layer.
QwenMixers ReadMixers(DecoderConfig& c, int kv_heads) {
  c.Skeleton({.max_position_embeddings = 32768,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .partial_rotary_factor = 0.25,
              .num_key_value_heads = kv_heads});
  AttentionSpec attention = c.Attention(256);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  attention.gate = true;
  attention.gate_bias = attention.bias;
  DeltaSpec delta;
  delta.num_heads = c.keys().Int("linear_num_value_heads", 32);
  delta.num_key_heads = c.keys().Int("linear_num_key_heads", 16);
  delta.key_dim = c.keys().Int("linear_key_head_dim", 128);
  delta.value_dim = c.keys().Int("linear_value_head_dim", 128);
  delta.taps = c.keys().Int("linear_conv_kernel_dim", 4);
  constexpr KeyRule kRules[] = {{"attention.num_heads", "linear_num_value_heads"},
                                {"attention.num_key_heads", "linear_num_key_heads"},
                                {"attention.key_dim", "linear_key_head_dim"},
                                {"attention.value_dim", "linear_value_head_dim"},
                                {"attention.conv", "linear_conv_kernel_dim"}};
  c.Keys(kRules);
  const int interval = c.keys().Int("full_attention_interval", 4);
  if (interval < 1) c.keys().Fault("full_attention_interval", "an integer >= 1", Concat(interval));
  enum : int { kFull, kLinear };
  const std::vector<int> kinds = LayerKinds(
      c, {{"full_attention", kFull}, {"linear_attention", kLinear}},
      [&](int layer) { return (layer + 1) % std::max(interval, 1) == 0 ? kFull : kLinear; });
  c.Ignore({"use_sliding_window"});
  // Published files of Qwen3.5 and later say what the classes of transformers always do.
  c.Require("attn_output_gate", true);
  c.Require("mamba_ssm_dtype", "float32");
  c.keys().Pick<int>("output_gate_type", {{"swish", 0}, {"silu", 0}}, 0);
  std::vector<LayerSpec> layers;
  for (const int kind : kinds) {
    LayerSpec& layer = layers.emplace_back();
    layer.attention = attention;
    if (kind == kLinear) layer.token_mixer = delta;
  }
  c.Tensors({OffsetNormTensors(), EmbeddingTensors(), DenseTensors(), ExpertTensors(),
             OneSharedExpertTensors()});
  c.MixerTensors(BlockKind::kAttention, {kGatedAttention, AttentionTensors()});
  c.MixerTensors(BlockKind::kDelta, {kQwenDelta});
  return {std::move(attention), std::move(layers)};
}

// Builds the configuration. `feed_forward` returns that of a layer; prediction layers have
// attention and `last`.
ConfigResult FinishQwen(DecoderConfig& c, QwenMixers mixers, const FeedForwardSpec& last,
                        const std::function<FeedForwardSpec(int)>& feed_forward) {
  const int predictions = c.keys().Int("mtp_num_hidden_layers", 1);
  if (c.keys().Bool("mtp_use_dedicated_embeddings", false) || predictions < 1) {
    c.IgnorePrefix("mtp.");  // no prediction layers with embeddings of their own
  } else {
    c.Prediction({mixers.attention, last}, kQwenPrediction, "mtp.");
  }
  return c.Finish([&](int layer) {
    LayerSpec own = std::move(mixers.layers[static_cast<size_t>(layer)]);
    own.feed_forward = feed_forward(layer);
    return own;
  });
}

ConfigResult ReadQwen3Next(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  QwenMixers mixers = ReadMixers(c, 2);
  const std::function<bool(int)> routed = c.SparseByStep();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->renormalize = c.keys().Bool("norm_topk_prob", true);
  experts.shared_width = c.keys().Int("shared_expert_intermediate_size", 512);
  experts.shared_gate = experts.shared_width > 0;
  return FinishQwen(c, std::move(mixers), experts,
                    [&](int layer) { return routed(layer) ? experts : dense; });
}

ConfigResult ReadQwen35Moe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  QwenMixers mixers = ReadMixers(c, 2);
  FeedForwardSpec experts = c.WithActivation(c.Experts({}));
  c.Require("norm_topk_prob", true);
  c.Require("mlp_only_layers", Json::array());
  experts.routing->renormalize = true;
  experts.shared_width = c.keys().Int("shared_expert_intermediate_size", 512);
  experts.shared_gate = experts.shared_width > 0;
  return FinishQwen(c, std::move(mixers), experts, [&](int) { return experts; });
}

ConfigResult ReadQwen35(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  QwenMixers mixers = ReadMixers(c, 4);
  const FeedForwardSpec dense = c.WithActivation(c.Dense());
  c.Require("mlp_only_layers", Json::array());
  return FinishQwen(c, std::move(mixers), dense, [&](int) { return dense; });
}

}  // namespace

constinit const Architecture kQwen3NextArchitecture = {.model_type = "qwen3_next",
                                                       .read = ReadQwen3Next};

constinit const Architecture kQwen35MoeArchitecture = {.model_type = "qwen3_5_moe_text",
                                                       .read = ReadQwen35Moe};

constinit const Architecture kQwen35Architecture = {.model_type = "qwen3_5_text",
                                                    .read = ReadQwen35};

}  // namespace moeserve

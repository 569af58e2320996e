// Kimi Linear, and Ling 3 (bailing_hybrid): most layers are linear attention with a delta rule
// whose decays are those of channels, the others latent attention.

#include <algorithm>
#include <utility>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/latent_keys.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

enum : int { kLatentLayer, kDeltaLayer };

constexpr TensorRule Channel(std::string_view model, std::string_view file) {
  return {.model = model, .file = file, .channel = true};
}

constexpr TensorRule kKdaTensors[] = {
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight"},
    {"blocks.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight"},
    Channel("blocks.*.attention.q_conv.weight", "model.layers.*.self_attn.q_conv1d.weight"),
    Channel("blocks.*.attention.k_conv.weight", "model.layers.*.self_attn.k_conv1d.weight"),
    Channel("blocks.*.attention.v_conv.weight", "model.layers.*.self_attn.v_conv1d.weight"),
    {"blocks.*.attention.gate_down.weight", "model.layers.*.self_attn.g_a_proj.weight"},
    {"blocks.*.attention.gate.weight", "model.layers.*.self_attn.g_b_proj.weight"},
    {"blocks.*.attention.gate.weight", "model.layers.*.self_attn.g_proj.weight"},
    {"blocks.*.attention.decay_down.weight", "model.layers.*.self_attn.f_a_proj.weight"},
    {"blocks.*.attention.decay.weight", "model.layers.*.self_attn.f_b_proj.weight"},
    {"blocks.*.attention.decay.weight", "model.layers.*.self_attn.f_proj.weight"},
    {"blocks.*.attention.beta.weight", "model.layers.*.self_attn.b_proj.weight"},
    {.model = "blocks.*.attention.decay_log",
     .file = "model.layers.*.self_attn.A_log",
     .units = true},
    {"blocks.*.attention.decay_bias", "model.layers.*.self_attn.dt_bias"},
    {"blocks.*.attention.out_norm.weight", "model.layers.*.self_attn.o_norm.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight"},
    // The names of Ling's files.
    {"blocks.*.attention.q.weight", "model.layers.*.attention.q_proj.weight"},
    {"blocks.*.attention.k.weight", "model.layers.*.attention.k_proj.weight"},
    {"blocks.*.attention.v.weight", "model.layers.*.attention.v_proj.weight"},
    Channel("blocks.*.attention.q_conv.weight", "model.layers.*.attention.q_conv1d.weight"),
    Channel("blocks.*.attention.k_conv.weight", "model.layers.*.attention.k_conv1d.weight"),
    Channel("blocks.*.attention.v_conv.weight", "model.layers.*.attention.v_conv1d.weight"),
    {"blocks.*.attention.gate.weight", "model.layers.*.attention.g_proj.weight"},
    {"blocks.*.attention.decay.weight", "model.layers.*.attention.f_proj.weight"},
    {"blocks.*.attention.beta.weight", "model.layers.*.attention.b_proj.weight"},
    {"blocks.*.attention.decay_log", "model.layers.*.attention.A_log"},
    {"blocks.*.attention.decay_bias", "model.layers.*.attention.dt_bias"},
    {"blocks.*.attention.out_norm.weight", "model.layers.*.attention.o_norm.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.attention.dense.weight"},
};

constexpr TensorRule Head(std::string_view model, int part) {
  return {.model = model,
          .file = "model.layers.*.attention.kv_b_proj.weight",
          .part = part,
          .parts = 2,
          .order = RowOrder::kLatent};
}

// The latent attention of Ling, and its names.
constexpr TensorRule kLingLatent[] = {
    {"blocks.*.attention.gate.weight", "model.layers.*.self_attn.g_proj.weight"},
    {"blocks.*.attention.gate.weight", "model.layers.*.attention.g_proj.weight"},
    {"blocks.*.attention.q.weight", "model.layers.*.attention.q_proj.weight"},
    {"blocks.*.attention.q.weight", "model.layers.*.attention.q_b_proj.weight"},
    {"blocks.*.attention.q_down.weight", "model.layers.*.attention.q_a_proj.weight"},
    {"blocks.*.attention.q_norm.weight", "model.layers.*.attention.q_a_layernorm.weight"},
    {"blocks.*.attention.latent.weight", "model.layers.*.attention.kv_a_proj_with_mqa.weight"},
    {"blocks.*.attention.latent_norm.weight", "model.layers.*.attention.kv_a_layernorm.weight"},
    Head("blocks.*.attention.heads.*.k.weight", 0),
    Head("blocks.*.attention.heads.*.v.weight", 1),
    {"blocks.*.attention.o.weight", "model.layers.*.attention.dense.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.dense.weight"},
};

constexpr TensorRule kOtherNames[] = {
    {"embed.weight", "model.word_embeddings.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.gate.expert_bias"},
    {"blocks.*.feed_forward.router.choice_bias",
     "model.layers.*.block_sparse_moe.gate.e_score_correction_bias"},
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.block_sparse_moe.gate_proj.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.block_sparse_moe.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.block_sparse_moe.down_proj.weight"},
    {"blocks.*.feed_forward.shared.gate.weight",
     "model.layers.*.block_sparse_moe.shared_experts.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight",
     "model.layers.*.block_sparse_moe.shared_experts.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight",
     "model.layers.*.block_sparse_moe.shared_experts.down_proj.weight"},
};

// Returns the configuration with one of the two names that files have for each of these keys.
Json WithOneName(const Json& json) {
  Json out = json;
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"model_max_length", "max_position_embeddings"},
      {"moe_renormalize", "norm_topk_prob"},
      {"num_expert_group", "n_group"},
      {"num_experts_per_token", "num_experts_per_tok"},
      {"num_shared_experts", "n_shared_experts"}};
  for (const auto& [other, name] : kNames) {
    if (!out.contains(other)) continue;
    if (!out.contains(name)) {
      out[name] = out[other];
      out.erase(other);
    } else if (out[name] == out[other]) {
      out.erase(other);
    }
  }
  return out;
}

void AddHybridTensors(DecoderConfig& c) {
  c.Tensors({EmbeddingTensors(), PreNormTensors(), DenseTensors(), ExpertTensors(),
             SharedExpertTensors(), BlockSparseTensors(), kOtherNames});
  c.MixerTensors(BlockKind::kAttention, {LatentTensors(), kLingLatent});
  c.MixerTensors(BlockKind::kDelta, {kKdaTensors});
  constexpr KeyRule kRules[] = {{"attention.key_dim", "linear_head_dim"},
                                {"attention.value_dim", "linear_head_dim"},
                                {"attention.num_key_heads", "linear_num_heads"},
                                {"attention.conv", "linear_conv_kernel_dim"}};
  c.Keys(kRules);
}

DeltaSpec ChannelDelta(int heads, int width, int taps) {
  DeltaSpec delta;
  delta.num_heads = delta.num_key_heads = heads;
  delta.key_dim = delta.value_dim = width;
  delta.taps = taps;
  delta.decay = DecayOf::kChannel;
  delta.gate_activation = GateActivation::kSigmoid;
  return delta;
}

// Reads which layers have linear attention from the lists of numbers, counted from 1, in
// "linear_attn_config".
std::vector<int> ListedLayers(DecoderConfig& c, ObjectReader& linear) {
  std::vector<int> kinds(static_cast<size_t>(std::max(c.layers(), 0)), -1);
  for (const auto& [key, kind] : {std::pair<const char*, int>{"kda_layers", kDeltaLayer},
                                  {"full_attn_layers", kLatentLayer}}) {
    const Json* const list = linear.Required(key, "a list of layers");
    if (list == nullptr) continue;
    for (const Json& entry : *list) {
      const int layer = IntFrom(entry).value_or(0);
      const bool known = list->is_array() && layer >= 1 && layer <= c.layers() &&
                         kinds[static_cast<size_t>(layer - 1)] == -1;
      if (!known) {
        linear.Fault(key, Concat("numbers of layers, from 1 to ", c.layers(), ", each listed once"),
                     ShowJson(entry));
        continue;
      }
      kinds[static_cast<size_t>(layer - 1)] = kind;
    }
  }
  const auto missing = std::ranges::find(kinds, -1);
  if (c.ok() && missing != kinds.end()) {
    linear.Fault("kda_layers", "every layer in one of the two lists",
                 Concat("no layer ", missing - kinds.begin() + 1));
  }
  return kinds;
}

ConfigResult ReadKimiLinear(const Json& original, const StoredNames& stored) {
  const Json json = WithOneName(original);
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 1048576,
              .rms_norm_eps = 1e-5,
              .bos_token_id = 163584,
              .eos_token_ids = {163586},
              .num_key_value_heads = 32,
              .rope = false});
  c.spec().position.kind = PositionKind::kNone;
  AttentionSpec attention = ReadLatentAttention(c, json, {.query_rank = 0});
  c.spec().position.pairing = RopePairing::kHalf;
  DeltaSpec delta =
      ChannelDelta(c.keys().Int("linear_num_heads", 32), c.keys().Int("linear_head_dim", 128),
                   c.keys().Int("linear_conv_kernel_dim", 4));
  std::vector<int> kinds;
  const Json* const config = c.keys().Optional("linear_attn_config");
  const bool listed = json.is_object() && json.contains("layer_types");
  if (config != nullptr) {
    ObjectReader linear(*config, "linear_attn_config", &c.problems());
    delta = ChannelDelta(linear.Int("num_heads", delta.num_heads),
                         linear.Int("head_dim", delta.key_dim),
                         linear.Int("short_conv_kernel_size", delta.taps));
    if (!listed && c.layers() <= kMaxLayers) kinds = ListedLayers(c, linear);
    for (const char* list : {"kda_layers", "full_attn_layers"}) linear.Optional(list);
    linear.RefuseOthers();
  }
  if (kinds.empty()) {
    kinds = LayerKinds(c, {{"linear_attention", kDeltaLayer}, {"full_attention", kLatentLayer}},
                       [](int i) { return i > 0 && i % 4 == 0 ? kLatentLayer : kDeltaLayer; });
  }
  // The ranks are the width of a head.
  delta.decay_rank = delta.gate_rank = delta.key_dim;
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts = c.DeepSeekExperts(
      {.count = "num_experts"}, {.routed_scaling_factor = 2.446, .n_shared_experts = 1});
  dense.expert.activation = experts.expert.activation;
  const std::vector<bool> sparse = c.SparseFrom(1);
  c.Require("mla_use_nope", true);
  c.Require("moe_router_activation_func", "sigmoid");
  c.Require("moe_layer_freq", 1);
  c.Ignore({"rope_theta", "rope_scaling", "use_grouped_topk", "num_nextn_predict_layers"});
  AddHybridTensors(c);
  return c.Finish([&](int layer) {
    const auto i = static_cast<size_t>(layer);
    LayerSpec own{.attention = attention, .feed_forward = sparse[i] ? experts : dense};
    if (kinds[i] == kDeltaLayer) own.token_mixer = delta;
    return own;
  });
}

ConfigResult ReadLing(const Json& original, const StoredNames& stored) {
  const Json json = WithOneName(original);
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 262144,
              .rope_theta = 6e6,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {156895},
              .num_key_value_heads = 32});
  ObjectReader& keys = c.keys();
  // Files of transformers have another "head_dim" beside "linear_head_dim".
  const int head_dim = keys.Int("head_dim", 128);
  const int width = keys.Int("linear_head_dim", head_dim);
  AttentionSpec attention = ReadLatentAttention(c, json, {.query_rank = 0});
  attention.gate = attention.gate_per_head = true;
  DeltaSpec delta =
      ChannelDelta(keys.Int("linear_num_heads", attention.num_heads), width,
                   keys.Int("linear_conv_kernel_dim", keys.Int("short_conv_kernel_size", 4)));
  if (keys.Bool("kda_safe_gate", true)) {
    delta.decay_form = DecayForm::kBounded;
    delta.decay_bound = keys.Real("kda_lower_bound", -5.0);
  } else {
    c.Ignore({"kda_lower_bound"});
  }
  const int group = keys.Int("layer_group_size", 6);
  const bool listed = json.is_object() && json.contains("layer_types");
  if (group < 1 || (!listed && c.layers() % std::max(group, 1) != 0)) {
    keys.Fault("layer_group_size",
               listed ? "an integer >= 1"
                      : Concat("a divisor of the ", c.layers(),
                               " layers, or layer_types; other programs disagree on the last ones"),
               Concat(group));
  }
  const std::vector<int> kinds = LayerKinds(
      c, {{"linear_attention", kDeltaLayer}, {"full_attention", kLatentLayer}},
      [&](int i) { return (i + 1) % std::max(group, 1) == 0 ? kLatentLayer : kDeltaLayer; });
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts = c.DeepSeekExperts(
      {.count = "num_experts"},
      {.routed_scaling_factor = 2.5, .n_group = 8, .topk_group = 4, .n_shared_experts = 1});
  dense.expert.activation = experts.expert.activation;
  const std::vector<bool> sparse = c.SparseFrom(2);
  c.IgnoreNextTokenLayers(keys.Int("num_nextn_predict_layers", 1));
  c.Require("score_function", "sigmoid");
  c.Require("moe_router_enable_expert_bias", true);
  c.Require("no_kda_lora", true);
  c.Require("rope_interleave", true);
  c.Require("use_bias", false);
  c.Require("use_qkv_bias", false);
  c.Require("gated_attention_proj_granularity_type", "head_wise");
  c.Ignore({"router_dtype", "use_qk_norm", "seq_aux", "max_window_layers",
            "mtp_loss_scaling_factor", "embedding_dropout", "output_dropout",
            "moe_shared_expert_intermediate_size"});
  AddHybridTensors(c);
  return c.Finish([&](int layer) {
    const auto i = static_cast<size_t>(layer);
    LayerSpec own{.attention = attention, .feed_forward = sparse[i] ? experts : dense};
    if (kinds[i] == kDeltaLayer) own.token_mixer = delta;
    return own;
  });
}

}  // namespace

constinit const Architecture kKimiLinearArchitecture = {.model_type = "kimi_linear",
                                                        .read = ReadKimiLinear};

constinit const Architecture kBailingHybridArchitecture = {.model_type = "bailing_hybrid",
                                                           .read = ReadLing};

}  // namespace moeserve

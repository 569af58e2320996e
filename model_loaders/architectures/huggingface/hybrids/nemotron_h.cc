// Nemotron-H and Nemotron 3: every layer has one mixer, which is a state space, an attention
// without positions, a dense feed-forward or experts.

#include <string>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/hybrids/state_space_keys.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kNemotron[] = {
    {"embed.weight", "model.embeddings.weight"},
    {"norm.weight", "model.norm_f.weight"},
    {"head.weight", "lm_head.weight"},
    {"blocks.*.attention.norm.weight", "model.layers.*.norm.weight"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.norm.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mixer.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.mixer.down_proj.weight"},
    {"blocks.*.feed_forward.up.bias", "model.layers.*.mixer.up_proj.bias"},
    {"blocks.*.feed_forward.down.bias", "model.layers.*.mixer.down_proj.bias"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mixer.gate.weight"},
    {"blocks.*.feed_forward.router.choice_bias",
     "model.layers.*.mixer.gate.e_score_correction_bias"},
    {"blocks.*.feed_forward.latent_down.weight", "model.layers.*.mixer.fc1_latent_proj.weight"},
    {"blocks.*.feed_forward.latent_up.weight", "model.layers.*.mixer.fc2_latent_proj.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.mixer.experts.*.up_proj.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.mixer.experts.*.down_proj.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.mixer.experts.up_proj"},
    {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.mixer.experts.down_proj"},
    {"blocks.*.feed_forward.shared.up.weight",
     "model.layers.*.mixer.shared_experts.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight",
     "model.layers.*.mixer.shared_experts.down_proj.weight"},
};

constexpr TensorRule kNemotronAttention[] = {
    {"blocks.*.attention.q.weight", "model.layers.*.mixer.q_proj.weight"},
    {"blocks.*.attention.k.weight", "model.layers.*.mixer.k_proj.weight"},
    {"blocks.*.attention.v.weight", "model.layers.*.mixer.v_proj.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.mixer.o_proj.weight"},
};

// Returns the configuration with the names of keys that newer files have: a list of the layers'
// kinds, and their number.
Json WithNewKeys(const Json& json) {
  Json out = json;
  constexpr std::pair<const char*, const char*> kOld[] = {
      {"mamba_n_groups", "n_groups"},       {"mamba_d_conv", "conv_kernel"},
      {"mamba_conv_bias", "use_conv_bias"}, {"mamba_dt_limit", "time_step_limit"},
      {"layer_types", "layers_block_type"}, {"num_local_experts", "n_routed_experts"}};
  for (const auto& [old_key, key] : kOld) {
    if (!out.contains(old_key)) continue;
    if (!out.contains(key)) out[key] = out[old_key];
    out.erase(old_key);
  }
  const auto pattern = out.find("hybrid_override_pattern");
  if (pattern != out.end() && pattern->is_string()) {
    Json kinds = Json::array();
    for (const char c : pattern->get_ref<const std::string&>()) {
      kinds.push_back(c == 'M'   ? "linear_attention"
                      : c == '*' ? "full_attention"
                      : c == 'E' ? "moe"
                      : c == '-' ? "mlp"
                                 : std::string("the letter ") + c);
    }
    out.erase(pattern);
    if (!out.contains("layers_block_type")) out["layers_block_type"] = std::move(kinds);
  }
  // The class's own default.
  const auto list = out.find("layers_block_type");
  if (list == out.end() || list->is_null()) {
    out["layers_block_type"] = {"linear_attention", "moe", "full_attention", "mlp"};
  }
  // The list alone counts.
  const Json& kinds = out["layers_block_type"];
  out["num_hidden_layers"] = kinds.is_array() ? kinds.size() : size_t{1};
  return out;
}

FeedForwardSpec ReadNemotronExperts(DecoderConfig& c) {
  FeedForwardSpec experts = c.DeepSeekExperts({.count = "n_routed_experts"}, {});
  experts.expert.form = ExpertForm::kPlain;
  experts.shared_width = c.keys().Int("moe_shared_expert_intermediate_size", 7688);
  experts.routing->latent_width = c.keys().Int("moe_latent_size", 0);
  constexpr KeyRule kRules[] = {
      {"feed_forward.shared_width", "moe_shared_expert_intermediate_size"},
      {"feed_forward.routing.latent_width", "moe_latent_size"}};
  c.Keys(kRules);
  return experts;
}

ConfigResult ReadNemotronH(const Json& json, const StoredNames& stored) {
  const Json config = WithNewKeys(json);
  DecoderConfig c(config, stored);
  c.Skeleton({.max_position_embeddings = 4096,
              .norm_eps_key = "layer_norm_epsilon",
              .rms_norm_eps = 1e-5,
              .num_key_value_heads = 8,
              .rope = false});
  // Published files have both names.
  c.Require("norm_eps", c.keys().Real("layer_norm_epsilon", 1e-5));
  c.spec().position.kind = PositionKind::kNone;
  enum : int { kStateSpaces, kAttention, kExperts, kDense };
  const std::vector<int> kinds = LayerKinds(
      c,
      {{"linear_attention", kStateSpaces},
       {"mamba", kStateSpaces},
       {"full_attention", kAttention},
       {"attention", kAttention},
       {"moe", kExperts},
       {"mlp", kDense}},
      [](int) { return kStateSpaces; }, "layers_block_type");
  const AttentionSpec attention = c.Attention(128);
  c.Require("sliding_window", nullptr);
  const StateSpaceSpec ssm =
      ReadStateSpace(c,
                     {"mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups",
                      "conv_kernel", "use_conv_bias", "use_bias"},
                     {.num_heads = 128, .head_dim = 64, .state_dim = 128, .groups = 8}, 0);
  c.Require("mamba_hidden_act", "silu");
  FeedForwardSpec dense;
  dense.width = c.keys().Int("intermediate_size", 21504);
  FeedForwardSpec experts = ReadNemotronExperts(c);
  dense.expert.form = ExpertForm::kPlain;
  dense.expert.activation = experts.expert.activation = c.Activation("mlp_hidden_act", "relu2");
  dense.expert.bias = experts.expert.bias = c.keys().Bool("mlp_bias", false);
  if (experts.expert.bias) c.Require("moe_latent_size", nullptr);
  c.Ignore({"attention_bias",
            "chunk_size",
            "expand",
            "hidden_act",
            "mamba_chunk_size",
            "mamba_expand",
            "mamba_proj_bias",
            "mamba_ssm_cache_dtype",
            "n_shared_experts",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "num_nextn_predict_layers",
            "partial_rotary_factor",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "rope_theta",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "use_mamba_kernels"});
  c.IgnorePrefix("mtp.");
  constexpr KeyRule kRules[] = {{"feed_forward.width", "intermediate_size"},
                                {"feed_forward.expert.bias", "mlp_bias"},
                                {"attention.bias", "use_bias"}};
  c.Keys(kRules);
  c.Prefix("model.", {"backbone.", "model."});
  c.Tensors(kNemotron);
  c.MixerTensors(BlockKind::kAttention, {kNemotronAttention});
  c.MixerTensors(BlockKind::kStateSpace, {MixerTensors()});
  return c.Finish([&](int layer) {
    LayerSpec own;
    own.one_block = true;
    switch (kinds[static_cast<size_t>(layer)]) {
      case kStateSpaces:
        own.token_mixer = ssm;
        break;
      case kAttention:
        own.token_mixer = attention;
        break;
      case kExperts:
        own.token_mixer = experts;
        break;
      default:
        own.token_mixer = dense;
    }
    return own;
  });
}

}  // namespace

constinit const Architecture kNemotronHArchitecture = {.model_type = "nemotron_h",
                                                       .read = ReadNemotronH};

}  // namespace moeserve

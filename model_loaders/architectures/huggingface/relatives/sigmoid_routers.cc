// Families with the router of DeepSeek-V3 and attention without latents that differ from others in
// names and a few settings: Hy3, K-EXAONE, Solar Open, Sarvam.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kHyRouter[] = {
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.gate.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.expert_bias"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.e_score_correction_bias"},
    {"blocks.*.feed_forward.shared.gate.weight", "model.layers.*.mlp.shared_mlp.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.mlp.shared_mlp.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "model.layers.*.mlp.shared_mlp.down_proj.weight"},
};

ConfigResult ReadHyV3(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 11158840.0,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 8});
  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  FeedForwardSpec dense = c.Dense();
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  FeedForwardSpec experts = c.DeepSeekExperts({}, {.routed_scaling_factor = 2.826,
                                                   .n_shared_experts = 1,
                                                   .factor_key = "router_scaling_factor",
                                                   .shared_key = "num_shared_experts"});
  dense.expert.activation = experts.expert.activation;
  if (dense.expert.bias) c.Require("mlp_bias", false);  // of shared experts, too
  // The sum of routed and shared experts is in f32 here in any case.
  c.Ignore({"enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax",
            "use_grouped_mm", "expert_hidden_dim"});
  for (const char* key :
       {"qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid"}) {
    c.Require(key, true);
  }
  const std::vector<bool> sparse = c.SparseFrom(1);
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 1));
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(), kHyRouter,
             DenseTensors(), ExpertTensors(), SharedExpertTensors()});
  return c.Finish(attention, dense, experts, sparse);
}

// Returns which layers slide by "sliding_window_pattern": every one but each n-th, or by the
// letters L and G of the layers, which repeat; the last layer of these never slides.
std::function<bool(int)> SlidingPattern(DecoderConfig& c) {
  constexpr std::string_view key = "sliding_window_pattern";
  const Json* const pattern = c.keys().Optional(key);
  int period = c.IsNull(key) ? 0 : 4;
  if (pattern != nullptr && pattern->is_string()) {
    const std::string letters = pattern->get<std::string>();
    if (!letters.empty() && letters.find_first_not_of("LG") == letters.npos) {
      return [letters, last = c.layers() - 1](int layer) {
        return layer != last && letters[static_cast<size_t>(layer) % letters.size()] == 'L';
      };
    }
    c.keys().Fault(key, "an integer or letters L and G", ShowJson(*pattern));
  } else if (pattern != nullptr) {
    const std::optional<int> number = IntFrom(*pattern);
    if (!number.has_value() || *number < 0) {
      c.keys().Fault(key, "an integer or letters L and G", ShowJson(*pattern));
    }
    period = number.value_or(0);
  }
  return [period](int layer) { return period > 0 && (layer + 1) % period != 0; };
}

constexpr TensorRule kExaoneBias[] = {
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.e_score_correction_bias"},
};

// If there is a window, only the layers with it have rotary positions.
ConfigResult ReadExaoneMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 2048,
              .rms_norm_eps = 1e-5,
              .bos_token_id = 1,
              .eos_token_ids = {53},
              .num_key_value_heads = 32});
  AttentionSpec attention = c.Attention();
  attention.qk_norm = QkNorm::kHead;
  const std::optional<int> window = c.Window(4096);
  const std::function<bool(int)> pattern = SlidingPattern(c);
  const std::vector<bool> sliding =
      c.SlidingLayers([&](int layer) { return window.has_value() && pattern(layer); });
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts = c.DeepSeekExperts(
      {},
      {.routed_scaling_factor = 2.5, .n_shared_experts = 1, .shared_key = "num_shared_experts"});
  dense.expert.activation = experts.expert.activation;
  const std::vector<bool> sparse = c.SparseFrom(1);
  c.Ignore({"num_nextn_predict_layers", "num_mtp_layers"});
  c.IgnorePrefix("mtp.");
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             DenseTensors(), ExpertTensors(), SharedExpertTensors(), kExaoneBias});
  PositionSpec none;
  none.kind = PositionKind::kNone;
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) {
      own.window = window;
    } else if (window.has_value()) {
      own.position = none;
    }
    return LayerSpec{own, sparse[static_cast<size_t>(layer)] ? experts : dense};
  });
}

ConfigResult ReadSolarOpen(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 1e6,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 8});
  AttentionSpec attention = c.Attention(128);
  attention.bias = c.keys().Bool("attention_bias", false);
  const FeedForwardSpec experts =
      c.DeepSeekExperts({.count = "n_routed_experts"}, {.n_shared_experts = 1});
  c.Require("first_k_dense_replace", 0);
  c.Require("use_qk_norm", false);
  c.Ignore({"intermediate_size"});  // of dense layers, of which there are none
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 0));
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), ExpertTensors(),
             SharedExpertTensors()});
  return c.Finish(attention, experts);
}

ConfigResult ReadSarvamMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rope_theta = 8e6,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {1},
              .num_key_value_heads = 4});
  AttentionSpec attention = c.Attention(64);
  attention.bias = c.keys().Bool(c.FirstOf({"attention_bias", "use_qkv_bias"}), false);
  c.Require("use_bias", false);
  if (c.keys().Bool("use_qk_norm", true)) attention.qk_norm = QkNorm::kHead;
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts =
      c.DeepSeekExperts({.count = "n_routed_experts"},
                        {.routed_scaling_factor = 2.5,
                         .n_shared_experts = 1,
                         .shared_key = c.FirstOf({"n_shared_experts", "num_shared_experts"})});
  dense.expert.activation = experts.expert.activation;
  const int first = c.keys().Int("first_k_dense_replace", 1);
  c.Require("moe_router_enable_expert_bias", true);
  c.Require("score_function", "sigmoid");
  c.Ignore({"router_dtype", "output_dropout", "embedding_dropout"});
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 0));
  c.Tensors({FusedAttentionTensors(), EmbeddingTensors(), PreNormTensors(), AttentionTensors(),
             QkNormTensors(), DenseTensors(), ExpertTensors(), SharedExpertTensors()});
  return c.Finish(attention, dense, experts, first);
}

}  // namespace

constinit const Architecture kExaoneMoeArchitecture = {.model_type = "exaone_moe",
                                                       .read = ReadExaoneMoe};

constinit const Architecture kHyV3Architecture = {.model_type = "hy_v3", .read = ReadHyV3};

constinit const Architecture kSarvamMoeArchitecture = {.model_type = "sarvam_moe",
                                                       .read = ReadSarvamMoe};

constinit const Architecture kSolarOpenArchitecture = {.model_type = "solar_open",
                                                       .read = ReadSolarOpen};

}  // namespace moeserve

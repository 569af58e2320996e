// MiniMax-M2: sigmoid gates with a choice bias, norms of whole projections.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kMinimaxM2Experts[] = {
    {"blocks.*.feed_forward.router.choice_bias",
     "model.layers.*.block_sparse_moe.e_score_correction_bias"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.e_score_correction_bias"},
};

ConfigResult ReadMiniMaxM2(const Json& json, const StoredNames& stored) {
  // Older files name the number of rotated dimensions.
  Json config = json;
  const auto rotary = json.find("rotary_dim"), head = json.find("head_dim");
  if (rotary != json.end() && head != json.end() && rotary->is_number() && head->is_number() &&
      head->get<double>() > 0 && !json.contains("partial_rotary_factor")) {
    config["partial_rotary_factor"] = rotary->get<double>() / head->get<double>();
  }
  DecoderConfig c(config, stored);
  c.Skeleton({.max_position_embeddings = 196608,
              .rope_theta = 5e6,
              .bos_token_id = 200034,
              .eos_token_ids = {200020},
              .num_key_value_heads = 8});
  c.Ignore({"rotary_dim"});
  AttentionSpec attention = c.Attention(128);
  attention.qk_norm = QkNorm::kFull;
  c.Require("use_qk_norm", true);
  c.Require("qk_norm_type", "per_layer");
  FeedForwardSpec experts =
      c.WithActivation(c.Experts({.count = "num_local_experts", .width = "intermediate_size"}));
  experts.routing->gate = GateKind::kSigmoid;
  experts.routing->renormalize = true;
  experts.routing->select.bias = true;
  c.Require("scoring_func", "sigmoid");
  c.Require("use_routing_bias", true);
  c.Require("shared_intermediate_size", 0);
  c.IgnoreNextTokenLayers(c.keys().Int("num_mtp_modules", 0));
  c.Ignore({"router_jitter_noise", "shared_moe_mode", "use_mtp", "mtp_transformer_layers",
            "attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta",
            "layernorm_mlp_beta", "mlp_intermediate_size"});
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             BlockSparseTensors(), kMinimaxM2Experts, ExpertTensors()});
  return c.Finish(attention, experts);
}

}  // namespace

constinit const Architecture kMiniMaxM2Architecture = {.model_type = "minimax_m2",
                                                       .read = ReadMiniMaxM2};

}  // namespace moeserve

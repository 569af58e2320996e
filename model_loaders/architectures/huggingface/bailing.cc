// Bailing MoE V2 (Ling 2.0, Ring 2.0): a router as in DeepSeek-V3, joined queries, keys and values.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

ConfigResult ReadBailing(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 32768,
              .rope_theta = 600000.0,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {156892}});
  c.Tensors({FusedAttentionTensors(), EmbeddingTensors(), PreNormTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors()});
  ObjectReader& keys = c.keys();
  AttentionSpec attention = c.Attention(128);
  attention.bias = keys.Bool("use_qkv_bias", false);
  if (keys.Bool("use_qk_norm", true)) attention.qk_norm = QkNorm::kHead;
  c.Require("use_bias", false);

  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  RoutedLayerSpec& routing = *experts.routing;
  dense.expert.activation = experts.expert.activation = c.Activation();
  routing.gate = GateKind::kSigmoid;
  // A single expert keeps its gate value as its weight.
  routing.renormalize = routing.select.k > 1;
  routing.scale = keys.Real("routed_scaling_factor", 1.0);
  routing.select.bias = true;
  routing.select.groups = keys.Int("n_group", 8);
  routing.select.best_groups = keys.Int("topk_group", 4);
  routing.select.group_score = GroupScoreKind::kSumOfTwo;
  experts.shared_width = c.SharedWidth("num_shared_experts", 1);
  c.Require("moe_router_enable_expert_bias", true);
  c.Require("score_function", "sigmoid");
  c.Require("norm_topk_prob", true);
  c.Ignore({"router_dtype", "embedding_dropout", "output_dropout", "max_window_layers",
            "mtp_loss_scaling_factor"});
  c.IgnoreNextTokenLayers(keys.Int("num_nextn_predict_layers", 0));
  constexpr KeyRule kRules[] = {{"feed_forward.routing.select.groups", "n_group"},
                                {"feed_forward.routing.select.best_groups", "topk_group"}};
  c.Keys(kRules);
  const int first = keys.Int("first_k_dense_replace", 1);
  return c.Finish(attention, dense, experts, first);
}

}  // namespace

constinit const Architecture kBailingMoeArchitecture = {.model_type = "bailing_moe_v2",
                                                        .read = ReadBailing};

}  // namespace moeserve

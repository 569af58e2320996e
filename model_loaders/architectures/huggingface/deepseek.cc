// DeepSeek-V2, DeepSeek-V3 and its relatives (Kimi-K2, Moonlight): multi-head latent attention.

#include <algorithm>
#include <cmath>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/decoder_config.h"
#include "model_loaders/architectures/huggingface/latent_attention.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kDeepseekAttention[] = {
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_b_proj.weight"},
    {"blocks.*.attention.q_down.weight", "model.layers.*.self_attn.q_a_proj.weight"},
    {"blocks.*.attention.q_down.bias", "model.layers.*.self_attn.q_a_proj.bias"},
    {"blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_a_layernorm.weight"},
    {"blocks.*.attention.latent.weight", "model.layers.*.self_attn.kv_a_proj_with_mqa.weight"},
    {"blocks.*.attention.latent.bias", "model.layers.*.self_attn.kv_a_proj_with_mqa.bias"},
    {"blocks.*.attention.latent_norm.weight", "model.layers.*.self_attn.kv_a_layernorm.weight"},
    {.model = "blocks.*.attention.heads.*.k.weight",
     .file = "model.layers.*.self_attn.kv_b_proj.weight",
     .part = 0,
     .parts = 2,
     .order = RowOrder::kLatent},
    {.model = "blocks.*.attention.heads.*.v.weight",
     .file = "model.layers.*.self_attn.kv_b_proj.weight",
     .part = 1,
     .parts = 2,
     .order = RowOrder::kLatent},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight"},
    {"blocks.*.attention.out_bias", "model.layers.*.self_attn.o_proj.bias"},
};

constexpr KeyRule kDeepseekKeys[] = {
    {"attention.latent.rank", "kv_lora_rank"},
    {"attention.latent.query_rank", "q_lora_rank"},
    {"attention.latent.rope_dim", "qk_rope_head_dim"},
    {"attention.latent.value_dim", "v_head_dim"},
    {"attention.head_dim", "qk_nope_head_dim + qk_rope_head_dim"},
};

// Rotation by yarn also scales the scores; "mscale_all_dim" is the part that is not in the cosines
// and sines.
double ScoreFactor(const Json& json) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto rope = json.find(key);
    if (rope == json.end() || !rope->is_object()) continue;
    const auto number = [&](const char* name) {
      const auto value = rope->find(name);
      return value != rope->end() && value->is_number() ? value->get<double>() : 0.0;
    };
    const double scale = number("mscale_all_dim"), factor = number("factor");
    if (scale == 0.0 || factor <= 1.0) return 1.0;
    const double magnitude = 0.1 * scale * std::log(factor) + 1.0;
    return magnitude * magnitude;
  }
  return 1.0;
}

}  // namespace

namespace huggingface {

AttentionSpec ReadLatentAttention(DecoderConfig& c, const Json& json,
                                  const LatentDefaults& defaults) {
  ObjectReader& keys = c.keys();
  c.Keys(kDeepseekKeys);
  AttentionSpec attention;
  attention.num_heads = keys.Int("num_attention_heads");
  attention.num_kv_heads = c.KvHeads(attention.num_heads);
  c.Ignore({"head_dim", "qk_head_dim"});  // follow from the keys below
  LatentSpec latent;
  latent.rank = keys.Int("kv_lora_rank", 512);
  // A query rank that is null differs from one that is absent.
  latent.query_rank = keys.Int("q_lora_rank", c.IsNull("q_lora_rank") ? 0 : defaults.query_rank);
  latent.rope_dim = keys.Int("qk_rope_head_dim", 64);
  latent.value_dim = keys.Int("v_head_dim", defaults.value_dim);
  const int64_t width = int64_t{keys.Int("qk_nope_head_dim", defaults.plain_dim)} + latent.rope_dim;
  attention.head_dim = static_cast<int>(std::clamp<int64_t>(width, -1, kMaxWidth + 1));
  if (attention.head_dim > 0) {
    attention.scale = ScoreFactor(json) / std::sqrt(static_cast<double>(attention.head_dim));
  }
  attention.latent = latent;
  attention.bias = attention.out_bias = keys.Bool("attention_bias", false);
  c.spec().position.pairing = RopePairing::kInterleaved;
  return attention;
}

std::span<const TensorRule> LatentTensors() { return kDeepseekAttention; }

void AddLatentTensors(DecoderConfig& c) {
  c.Tensors({EmbeddingTensors(), PreNormTensors(), kDeepseekAttention, DenseTensors(),
             ExpertTensors(), SharedExpertTensors()});
  // Settings of training and of how the authors' code runs.
  c.Ignore({"aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers"});
}

}  // namespace huggingface

namespace {

ConfigResult ReadV2(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  AddLatentTensors(c);
  c.Require("moe_layer_freq", 1);
  const AttentionSpec attention = ReadLatentAttention(c, json, {});
  FeedForwardSpec dense = c.Dense();
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  FeedForwardSpec experts = c.Experts({.count = "n_routed_experts"});
  RoutedLayerSpec& routing = *experts.routing;
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.expert.bias = dense.expert.bias;
  c.Require("scoring_func", "softmax");
  routing.scale = c.keys().Real("routed_scaling_factor", 1.0);
  // The authors' code either divides the weights by their sum or applies the factor.
  if (c.keys().Bool("norm_topk_prob", false) && routing.select.k > 1) {
    routing.renormalize = true;
    routing.scale = 1.0;
    c.Decide(
        "norm_topk_prob is true: as in the authors' code, the weights of the selected experts are "
        "divided by their sum, and routed_scaling_factor is not applied; transformers ignores the "
        "key");
  }
  enum class Method { kGreedy, kGroups };
  const Method method =
      c.keys()
          .Pick<Method>("topk_method",
                        {{"greedy", Method::kGreedy}, {"group_limited_greedy", Method::kGroups}},
                        Method::kGreedy)
          .value_or(Method::kGreedy);
  const int groups = c.keys().Int("n_group", 1);
  const int best_groups = c.keys().Int("topk_group", 1);
  if (method == Method::kGroups) {
    routing.select.groups = groups;
    routing.select.best_groups = best_groups;
    routing.select.group_score = GroupScoreKind::kMax;
    routing.select.group_mask = GroupMaskKind::kZero;
  }
  experts.shared_width = c.SharedWidth("n_shared_experts", 2);
  constexpr KeyRule kGroups[] = {{"feed_forward.routing.select.groups", "n_group"},
                                 {"select.groups", "n_group"},
                                 {"feed_forward.routing.select.best_groups", "topk_group"}};
  c.Keys(kGroups);
  return c.Finish(attention, dense, experts, c.keys().Int("first_k_dense_replace", 0));
}

ConfigResult ReadV3(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 4096,
              .bos_token_id = 0,
              .eos_token_ids = {1},
              .num_key_value_heads = 128});
  AddLatentTensors(c);
  c.Require("moe_layer_freq", 1);
  const AttentionSpec attention = ReadLatentAttention(c, json, {});
  if (!c.keys().Bool("rope_interleave", true)) c.spec().position.pairing = RopePairing::kHalf;
  FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts = c.DeepSeekExperts(
      {.count = "n_routed_experts"},
      {.routed_scaling_factor = 2.5, .n_group = 8, .topk_group = 4, .n_shared_experts = 1});
  dense.expert.activation = experts.expert.activation;
  const int first = c.keys().Int("first_k_dense_replace", 3);
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 1));
  return c.Finish(attention, dense, experts, first);
}

}  // namespace

constinit const Architecture kDeepSeekV2Architecture = {.model_type = "deepseek_v2",
                                                        .read = ReadV2};

constinit const Architecture kDeepSeekV3Architecture = {.model_type = "deepseek_v3",
                                                        .read = ReadV3};

constinit const Architecture kKimiK2Architecture = {.model_type = "kimi_k2", .read = ReadV3};

}  // namespace moeserve

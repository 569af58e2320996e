// DeepSeek-V2, DeepSeek-V3 and its relatives (Kimi-K2, Moonlight, Mistral 4): multi-head latent
// attention.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/latent_keys.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

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
  c.NextTokenLayers(c.keys().Int("num_nextn_predict_layers", 1), {attention, experts});
  return c.Finish(attention, dense, experts, first);
}

// The rotary parameters of Mistral 4 also have the scale of queries.
ConfigResult ReadMistral4(const Json& json, const StoredNames& stored) {
  Json rest = json;
  Json rope = {{"type", "yarn"},
               {"rope_theta", 10000.0},
               {"factor", 128.0},
               {"original_max_position_embeddings", 8192},
               {"mscale_all_dim", 1.0},
               {"mscale", 1.0},
               {"llama_4_scaling_beta", 0.1}};
  if (const auto own = json.find("rope_parameters"); own != json.end() && own->is_object()) {
    rope = *own;
  }
  const auto number = [&](const char* key) {
    const auto found = rope.find(key);
    return found != rope.end() && found->is_number() ? found->get<double>() : 0.0;
  };
  const double beta = number("llama_4_scaling_beta");
  const double step = number("original_max_position_embeddings");
  const double fraction = number("partial_rotary_factor");
  for (const char* key :
       {"llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor"}) {
    rope.erase(key);
  }
  const auto given = json.find("rope_parameters");
  if (given == json.end() || given->is_null() || given->is_object()) rest["rope_parameters"] = rope;
  DecoderConfig c(rest, stored);
  c.Skeleton({.max_position_embeddings = 1048576, .num_key_value_heads = 32});
  AddLatentTensors(c);
  c.Require("moe_layer_freq", 1);
  AttentionSpec attention = ReadLatentAttention(
      c, rest,
      {.query_rank = 1024, .rank = 256, .rope_dim = 64, .plain_dim = 64, .value_dim = 128});
  if (!c.keys().Bool("rope_interleave", true)) c.spec().position.pairing = RopePairing::kHalf;
  const int rope_dim = attention.latent->rope_dim;
  if (fraction != 0.0 && std::fabs(fraction * attention.head_dim - rope_dim) > 1e-3) {
    c.keys().Fault("rope_parameters",
                   "the partial_rotary_factor qk_rope_head_dim / (qk_nope_head_dim + "
                   "qk_rope_head_dim)",
                   ShowJson(fraction));
  }
  if (beta != 0.0) {
    if (step > 0) {
      attention.query_scale = QueryScaleSpec{.step = step, .factor = beta, .first = 0};
    } else {
      c.keys().Fault("rope_parameters", "original_max_position_embeddings above 0", ShowJson(step));
    }
  }
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({.count = "n_routed_experts"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  RoutedLayerSpec& routing = *experts.routing;
  ObjectReader& keys = c.keys();
  routing.renormalize = keys.Bool("norm_topk_prob", true);
  routing.scale = keys.Real("routed_scaling_factor", 1.0);
  routing.select.groups = keys.Int("n_group", 1);
  routing.select.best_groups = keys.Int("topk_group", 1);
  routing.select.group_score = GroupScoreKind::kSumOfTwo;
  routing.select.group_mask = GroupMaskKind::kZero;
  experts.shared_width = c.SharedWidth("n_shared_experts", 1);
  constexpr KeyRule kRules[] = {{"feed_forward.routing.select.groups", "n_group"},
                                {"select.groups", "n_group"},
                                {"feed_forward.routing.select.best_groups", "topk_group"},
                                {"feed_forward.routing.scale", "routed_scaling_factor"}};
  c.Keys(kRules);
  return c.Finish(attention, dense, experts, keys.Int("first_k_dense_replace", 0));
}

}  // namespace

constinit const Architecture kMistral4Architecture = {.model_type = "mistral4",
                                                      .read = ReadMistral4};

constinit const Architecture kDeepSeekV2Architecture = {.model_type = "deepseek_v2",
                                                        .read = ReadV2};

constinit const Architecture kDeepSeekV3Architecture = {.model_type = "deepseek_v3",
                                                        .read = ReadV3};

constinit const Architecture kKimiK2Architecture = {.model_type = "kimi_k2", .read = ReadV3};

}  // namespace moeserve

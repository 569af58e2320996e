// LongCat-Flash: a layer of the files is two layers here. The experts of the first one join the
// residual stream at the end of the second one.

#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/latent_keys.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kLongcatTensors[] = {
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.mlps.gate_proj.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mlps.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.mlps.down_proj.weight"},
    {"blocks.*.feed_forward.shared.gate.weight", "model.layers.*.mlps.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.mlps.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "model.layers.*.mlps.down_proj.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.classifier.weight"},
    {"blocks.*.feed_forward.router.bias", "model.layers.*.mlp.router.classifier.bias"},
    {"blocks.*.feed_forward.router.choice_bias",
     "model.layers.*.mlp.router.e_score_correction_bias"},
};

constexpr std::string_view kLayers = "model.layers.";

// Splits "model.layers.N.PART.REST".
struct LayerName {
  int layer = -1;  // -1: the name has another form
  std::string_view part, rest;
};

bool TakeNumber(std::string_view& text, int& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto digits = static_cast<size_t>(end - text.data());
  if (error != std::errc() || digits == text.size() || *end != '.' || number < 0) return false;
  if (digits > 1 && text[0] == '0') return false;
  text.remove_prefix(digits + 1);
  return number <= kMaxLayers;
}

LayerName Split(std::string_view name) {
  LayerName split;
  if (!name.starts_with(kLayers)) return split;
  name.remove_prefix(kLayers.size());
  int layer = 0;
  const bool numbered = TakeNumber(name, layer);
  const size_t dot = name.find('.');
  if (!numbered || dot == std::string_view::npos) return split;
  return {.layer = layer, .part = name.substr(0, dot), .rest = name.substr(dot + 1)};
}

// Whether both halves of a layer have such a part.
bool IsOfHalf(std::string_view part) {
  return part == "self_attn" || part == "mlps" || part == "input_layernorm" ||
         part == "post_attention_layernorm";
}

// "model.layers.3.self_attn.1.o_proj.weight" is "model.layers.7.self_attn.o_proj.weight" here.
std::string NumberInRules(std::string_view stored) {
  LayerName name = Split(stored);
  if (name.layer < 0) return std::string(stored);
  int half = 0;
  if (IsOfHalf(name.part) && (!TakeNumber(name.rest, half) || half > 1)) {
    return Concat(kLayers, 2 * name.layer, ".?.", name.part, '.', name.rest);
  }
  return Concat(kLayers, 2 * name.layer + half, '.', name.part, '.', name.rest);
}

std::string NumberInFiles(std::string_view rule) {
  const LayerName name = Split(rule);
  if (name.layer < 0) return std::string(rule);
  const std::string half = IsOfHalf(name.part) ? Concat(name.layer % 2, '.') : std::string();
  return Concat(kLayers, name.layer / 2, '.', name.part, '.', half, name.rest);
}

ConfigResult ReadLongcat(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.size_keys = {.layers = "num_layers"},
              .max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 1e7});
  const int pairs = c.layers();
  if (pairs > 0 && pairs <= kMaxLayers / 2) c.SetLayers(2 * pairs);
  c.Mapping({.in_rules = NumberInRules, .in_files = NumberInFiles});
  AttentionSpec attention = ReadLatentAttention(c, json, {.query_rank = 1536});
  LatentSpec& latent = *attention.latent;
  const double width = c.spec().hidden_size;
  if (latent.rank > 0 && width > 0) latent.scale = std::sqrt(width / latent.rank);
  if (latent.query_rank > 0 && width > 0) attention.scale *= std::sqrt(width / latent.query_rank);
  c.Require("mla_scale_q_lora", true);
  c.Require("mla_scale_kv_lora", true);
  c.Require("attention_method", "MLA");
  c.Require("zero_expert_type", "identity");
  c.Require("norm_topk_prob", false);
  c.Ignore({"num_hidden_layers"});

  FeedForwardSpec dense = c.Dense("ffn_hidden_size");
  FeedForwardSpec experts = c.Experts(
      {.count = "n_routed_experts", .width = "expert_ffn_hidden_size", .selected = "moe_topk"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  RoutedLayerSpec& routing = *experts.routing;
  routing.null_experts.copy =
      c.keys().Int("zero_expert_num", c.IsNull("zero_expert_num") ? 0 : 256);
  if (routing.null_experts.copy < 0 || routing.null_experts.copy > kMaxExperts) {
    c.keys().Fault("zero_expert_num", Concat("an integer in [0, ", kMaxExperts, ']'),
                   std::to_string(routing.null_experts.copy));
  } else {
    routing.num_experts += routing.null_experts.copy;
  }
  // transformers also writes matrices for experts that only copy their input.
  const int64_t copies = int64_t{pairs} * routing.null_experts.copy;
  for (int layer = 0; c.ok() && copies <= kMaxExpertsOfModel && layer < pairs; ++layer) {
    for (int e = routing.num_bodies(); e < routing.num_experts; ++e) {
      c.IgnorePrefix(Concat(kLayers, 2 * layer, ".mlp.experts.", e, '.'));
    }
  }
  routing.select.bias = true;
  routing.scale = c.keys().Real("routed_scaling_factor", 6.0);
  routing.score.bias = c.keys().Bool("router_bias", false);
  experts.shared_width = dense.width;
  experts.late_experts = true;
  constexpr KeyRule kRules[] = {{"feed_forward.shared_width", "ffn_hidden_size"},
                                {"feed_forward.routing.null_experts.copy", "zero_expert_num"},
                                {"feed_forward.routing.scale", "routed_scaling_factor"}};
  c.Keys(kRules);
  c.Tensors(
      {EmbeddingTensors(), PreNormTensors(), LatentTensors(), kLongcatTensors, ExpertTensors()});
  return c.Finish([&](int layer) {
    return LayerSpec{attention, layer % 2 == 0 ? experts : dense};
  });
}

}  // namespace

constinit const Architecture kLongcatFlashArchitecture = {.model_type = "longcat_flash",
                                                          .read = ReadLongcat};

}  // namespace moeserve

// Olmo 2, Olmo 3, OLMoE and FlexOlmo: norms of whole query and key projections.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// Adds what all of these models have: RMS norms of the whole query and key projections.
AttentionSpec OlmoAttention(DecoderConfig& c) {
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kFull;
  c.Tensors({EmbeddingTensors(), AttentionTensors(), QkNormTensors()});
  return attention;
}

// Reads rotary parameters that are given for each type of layer, as newer files do. `type` is
// "sliding_attention" or "full_attention".
void ReadRopeOfLayers(DecoderConfig& c, const Json& json, std::string_view type,
                      double default_theta, PositionSpec& position) {
  const auto all = json.find("rope_parameters");
  if (all == json.end() || !all->is_object()) return;
  const auto own = all->find(type);
  if (own == all->end()) return;
  position = c.RopeFrom(*own, Concat("rope_parameters.", type), default_theta);
}

// Reads the experts of the models in which all layers have some.
ConfigResult FinishExperts(DecoderConfig& c, const AttentionSpec& attention) {
  FeedForwardSpec experts = c.WithActivation(c.Experts({.width = "intermediate_size"}));
  experts.routing->renormalize = c.keys().Bool("norm_topk_prob", false);
  c.Tensors(ExpertTensors());
  return c.Finish(attention, experts);
}

ConfigResult ReadOlmo2(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.rms_norm_eps = 1e-5, .bos_token_id = std::nullopt, .eos_token_ids = {50279}});
  c.spec().norm.placement = NormPlacement::kOutput;
  const AttentionSpec attention = OlmoAttention(c);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  c.Tensors({OutputNormTensors(), DenseTensors()});
  return c.Finish(attention, dense);
}

ConfigResult ReadOlmo3(const Json& json, const StoredNames& stored) {
  // The layers' types have rotary parameters of their own, so Skeleton() must not read them.
  constexpr double kTheta = 500000.0;
  Json rest = json;
  const bool of_layers =
      json.contains("rope_parameters") && DecoderConfig::IsRopeOfLayers(json["rope_parameters"]);
  if (of_layers) rest.erase("rope_parameters");
  DecoderConfig c(rest, stored);
  c.Skeleton({.rms_norm_eps = 1e-5,
              .rope_theta = kTheta,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {50279}});
  c.spec().norm.placement = NormPlacement::kOutput;
  AttentionSpec attention = OlmoAttention(c);
  const int window = c.Window().value_or(4096);
  const std::vector<bool> sliding = c.SlidingLayers([](int layer) { return (layer + 1) % 4 != 0; });
  // Scaling, in older files, concerns the layers without a window only.
  PositionSpec local = c.spec().position;
  local.scaling = {};
  if (of_layers) {
    ReadRopeOfLayers(c, json, "full_attention", kTheta, c.spec().position);
    ReadRopeOfLayers(c, json, "sliding_attention", kTheta, local);
  }
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  c.Tensors({OutputNormTensors(), DenseTensors()});
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) {
      own.window = window;
      own.position = local;
    }
    return LayerSpec{own, dense};
  });
}

ConfigResult ReadOlmoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 4096,
              .rms_norm_eps = 1e-5,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {50279}});
  AttentionSpec attention = OlmoAttention(c);
  if (c.keys().Optional("clip_qkv") != nullptr) {
    attention.qkv_clip = c.keys().Real("clip_qkv");
    if (attention.qkv_clip == 0.0) c.keys().Fault("clip_qkv", "null or a number above 0", "0");
  }
  constexpr KeyRule kKeys[] = {{"attention.qkv_clip", "clip_qkv"}};
  c.Keys(kKeys);
  c.Tensors(PreNormTensors());
  return FinishExperts(c, attention);
}

ConfigResult ReadFlexOlmo(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 4096,
              .rope_theta = 500000.0,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {100257}});
  c.spec().norm.placement = NormPlacement::kOutput;
  const AttentionSpec attention = OlmoAttention(c);
  c.Tensors(OutputNormTensors());
  return FinishExperts(c, attention);
}

}  // namespace

constinit const Architecture kOlmo2Architecture = {.model_type = "olmo2", .read = ReadOlmo2};

constinit const Architecture kOlmo3Architecture = {.model_type = "olmo3", .read = ReadOlmo3};

constinit const Architecture kOlmoeArchitecture = {.model_type = "olmoe", .read = ReadOlmoe};

constinit const Architecture kFlexOlmoArchitecture = {.model_type = "flex_olmo",
                                                      .read = ReadFlexOlmo};

}  // namespace moeserve

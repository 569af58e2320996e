// Llama 4 (text): most layers attend within chunks of positions and rotate, the others see all
// positions and scale their queries. The weights of experts multiply their inputs.

#include <algorithm>
#include <string>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule Stacked4(std::string_view model, std::string_view file, int part) {
  return Transposed({.model = model, .file = file, .part = part, .parts = 2});
}

constexpr TensorRule kLlama4FeedForward[] = {
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.feed_forward.gate_proj.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.feed_forward.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.feed_forward.down_proj.weight"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.feed_forward.router.weight"},
    {"blocks.*.feed_forward.shared.gate.weight",
     "model.layers.*.feed_forward.shared_expert.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight",
     "model.layers.*.feed_forward.shared_expert.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight",
     "model.layers.*.feed_forward.shared_expert.down_proj.weight"},
    Stacked4("blocks.*.feed_forward.experts.*.gate.weight",
             "model.layers.*.feed_forward.experts.gate_up_proj", 0),
    Stacked4("blocks.*.feed_forward.experts.*.up.weight",
             "model.layers.*.feed_forward.experts.gate_up_proj", 1),
    Transposed({"blocks.*.feed_forward.experts.*.down.weight",
                "model.layers.*.feed_forward.experts.down_proj"}),
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.feed_forward.experts.*.gate_proj.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.feed_forward.experts.*.up_proj.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.feed_forward.experts.*.down_proj.weight"},
};

// Reads a list of integers; nullopt without one.
std::optional<std::vector<int>> IntegerList(DecoderConfig& c, std::string_view key) {
  const Json* const json = c.keys().Optional(key);
  if (json == nullptr) return std::nullopt;
  std::vector<int> list;
  bool valid = json->is_array() && json->size() <= static_cast<size_t>(kMaxLayers);
  for (size_t i = 0; valid && i < json->size(); ++i) {
    const std::optional<int> number = IntFrom((*json)[i]);
    valid = number.has_value();
    list.push_back(number.value_or(0));
  }
  if (!valid) c.keys().Fault(key, "a list of integers", ShowJson(*json));
  return list;
}

// Returns which layers rotate queries and keys.
std::vector<bool> RotatedLayers(DecoderConfig& c) {
  const int layers = std::clamp(c.layers(), 0, kMaxLayers);
  const int interval = c.keys().Int("no_rope_layer_interval", 4);
  std::vector<bool> rotated;
  for (int i = 0; i < layers; ++i) rotated.push_back(interval <= 0 || (i + 1) % interval != 0);
  const std::optional<std::vector<int>> list = IntegerList(c, "no_rope_layers");
  if (!list.has_value() || list->empty()) return rotated;
  if (list->size() != rotated.size()) {
    c.keys().Fault("no_rope_layers", Concat("a list of ", layers, " integers"),
                   Concat("a list of ", list->size()));
    return rotated;
  }
  for (size_t i = 0; i < rotated.size(); ++i) rotated[i] = (*list)[i] != 0;
  return rotated;
}

std::vector<AttentionSpec> ReadAttention4(DecoderConfig& c) {
  ObjectReader& keys = c.keys();
  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = keys.Bool("attention_bias", false);
  const std::vector<bool> rotated = RotatedLayers(c);
  const bool chunked = !c.IsNull("attention_chunk_size");
  const int chunk = keys.Int("attention_chunk_size", 8192);
  const std::vector<int> kinds =
      LayerKinds(c, {{"full_attention", 0}, {"chunked_attention", 1}},
                 [&](int layer) { return chunked && rotated[static_cast<size_t>(layer)] ? 1 : 0; });
  const bool normed = keys.Bool("use_qk_norm", true);
  // Published files have a number, which counts as in Python.
  const Json* const tuned = keys.Optional("attn_temperature_tuning");
  const bool scaled = tuned != nullptr && tuned->is_number_integer()
                          ? tuned->get<int64_t>() != 0
                          : keys.Bool("attn_temperature_tuning", true);
  const QueryScaleSpec scale{.step = static_cast<double>(keys.Int("floor_scale", 8192)),
                             .factor = keys.Real("attn_scale", 0.1),
                             .first = 1};
  constexpr KeyRule kRules[] = {{"attention.window", "attention_chunk_size"},
                                {"attention.query_scale.step", "floor_scale"},
                                {"attention.query_scale.factor", "attn_scale"}};
  c.Keys(kRules);
  std::vector<AttentionSpec> layers;
  for (size_t i = 0; i < kinds.size(); ++i) {
    AttentionSpec own = attention;
    if (kinds[i] == 1) {
      own.window = chunk;
      own.window_kind = WindowKind::kChunk;
    }
    if (rotated[i]) {
      own.qk_norm = normed ? QkNorm::kL2 : QkNorm::kNone;
      own.qk_norm_after_rope = normed;
    } else {
      own.position.emplace().kind = PositionKind::kNone;
      if (scaled) own.query_scale = scale;
    }
    layers.push_back(own);
  }
  return layers;
}

ConfigResult ReadLlama4(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 500000.0,
              .num_key_value_heads = 8});
  c.spec().position.pairing = RopePairing::kInterleaved;
  c.Ignore({"router_jitter_noise", "for_llm_compressor"});
  const std::vector<AttentionSpec> layers = ReadAttention4(c);

  FeedForwardSpec dense = c.Dense("intermediate_size_mlp");
  FeedForwardSpec experts = c.Experts({.count = "num_local_experts", .width = "intermediate_size"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->gate = GateKind::kSigmoid;
  experts.routing->weight_input = true;
  experts.shared_width = c.keys().Int("intermediate_size");
  const int step = c.keys().Int("interleave_moe_layer_step", 1);
  const std::optional<std::vector<int>> list = IntegerList(c, "moe_layers");
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), kLlama4FeedForward});
  return c.Finish([&](int layer) {
    const bool routed = list.has_value() ? std::ranges::find(*list, layer) != list->end()
                                         : step > 0 && (layer + 1) % step == 0;
    return LayerSpec{layers[static_cast<size_t>(layer)], routed ? experts : dense};
  });
}

}  // namespace

constinit const Architecture kLlama4Architecture = {.model_type = "llama4_text",
                                                    .read = ReadLlama4};

}  // namespace moeserve

// MiMo-V2-Flash: values are narrower than keys, and layers with a window have more kv heads and
// sinks.

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kMimoSinks[] = {
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.sinks"},
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.attention_sink_bias"},
};

constexpr double kFraction = 0.334;

// Rounds the number of rotated elements of a head down.
void Truncate(PositionSpec& position, int head_dim) {
  if (head_dim > 0) position.fraction = std::floor(position.fraction * head_dim) / head_dim;
}

// Returns the kinds of layers: 1 for those of the list that is not null, else `fallback`. Older
// files have lists of 0 and 1.
std::vector<int> KindsOf(DecoderConfig& c, const Json& json, std::string_view old,
                         std::initializer_list<LayerKindName> names, std::string_view key,
                         const std::function<int(int)>& fallback) {
  const auto found = json.find(old);
  const bool is_old = found != json.end() && !found->is_null();
  if (is_old) c.keys().Optional(old);
  if (!is_old || (json.contains(key) && !json[std::string(key)].is_null())) {
    return LayerKinds(c, names, fallback, key);
  }
  const auto layers = static_cast<size_t>(std::max(c.layers(), 0));
  std::vector<int> kinds;
  bool valid = found->is_array() && found->size() == layers;
  for (size_t i = 0; valid && i < layers; ++i) {
    const std::optional<int> kind = IntFrom((*found)[i]);
    valid = kind == 0 || kind == 1;
    kinds.push_back(kind.value_or(0));
  }
  if (!valid)
    c.keys().Fault(old, Concat("a list of ", layers, " zeros and ones"), ShowJson(*found));
  kinds.resize(std::min<size_t>(layers, 10'000));
  return kinds;
}

ConfigResult ReadMimo(const Json& json, const StoredNames& stored) {
  Json rest = json;
  const auto parameters = json.find("rope_parameters");
  const bool of_layers = parameters != json.end() && DecoderConfig::IsRopeOfLayers(*parameters);
  if (of_layers) rest.erase("rope_parameters");
  DecoderConfig c(rest, stored);
  const bool old_eps = json.contains("layernorm_epsilon");
  c.Skeleton({.max_position_embeddings = 131072,
              .norm_eps_key = old_eps ? "layernorm_epsilon" : "rms_norm_eps",
              .rms_norm_eps = 1e-5,
              .rope_theta = 5e6,
              .eos_token_ids = {},
              .partial_rotary_factor = kFraction,
              .num_key_value_heads = 4});
  c.Require("rope_parameters", nullptr);
  ObjectReader& keys = c.keys();
  AttentionSpec attention = c.Attention(192);
  attention.bias = keys.Bool("attention_bias", false);
  attention.value_dim = keys.Int("v_head_dim", 128);
  attention.value_scale =
      keys.Real("attention_value_scale", c.IsNull("attention_value_scale") ? 1.0 : 0.707);
  PositionSpec& full = c.spec().position;
  PositionSpec local;
  local.theta = keys.Real("swa_rope_theta", 1e4);
  local.fraction = full.fraction;
  for (const bool is_full : {true, false}) {
    const char* const type = is_full ? "full_attention" : "sliding_attention";
    if (!of_layers || !parameters->contains(type)) continue;
    Json own = (*parameters)[type];
    if (own.is_object() && !own.contains("partial_rotary_factor")) {
      own["partial_rotary_factor"] = kFraction;
    }
    (is_full ? full : local) =
        c.RopeFrom(own, std::string("rope_parameters.") + type, is_full ? 5e6 : 1e4);
  }
  Truncate(full, attention.head_dim);
  Truncate(local, attention.head_dim);
  const int window = c.Window(129).value_or(129);
  const int size = keys.Int("sliding_window_size", window - 1);
  const int kv_heads = keys.Int("swa_num_key_value_heads", 2 * attention.num_kv_heads);
  c.Require("attention_projection_layout", nullptr);
  c.Require("swa_head_dim", attention.head_dim);
  c.Require("swa_v_head_dim", *attention.value_dim);
  c.Require("swa_num_attention_heads", attention.num_heads);
  c.Require("add_swa_attention_sink_bias", true);
  c.Require("add_full_attention_sink_bias", false);
  c.Ignore({"attention_chunk_size"});  // a copy of the window
  const std::vector<int> sliding =
      KindsOf(c, json, "hybrid_layer_pattern", {{"full_attention", 0}, {"sliding_attention", 1}},
              "layer_types", [](int layer) { return layer == 0 || (layer + 1) % 6 == 0 ? 0 : 1; });
  const std::vector<int> sparse =
      KindsOf(c, json, "moe_layer_freq", {{"dense", 0}, {"sparse", 1}}, "mlp_layer_types",
              [](int layer) { return layer == 0 ? 0 : 1; });

  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.DeepSeekExperts({.count = "n_routed_experts"}, {});
  dense.expert.activation = experts.expert.activation;
  constexpr KeyRule kRules[] = {{"attention.value_dim", "v_head_dim"},
                                {"attention.value_scale", "attention_value_scale"}};
  c.Keys(kRules);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors(), kMimoSinks});
  return c.Finish([&](int layer) {
    const auto index = static_cast<size_t>(layer);
    AttentionSpec own = attention;
    if (sliding[index] == 1) {
      own.window = size + 1;
      own.num_kv_heads = kv_heads;
      own.sinks = true;
      own.position = local;
    }
    return LayerSpec{own, sparse[index] == 1 ? experts : dense};
  });
}

}  // namespace

constinit const Architecture kMimoV2FlashArchitecture = {.model_type = "mimo_v2_flash",
                                                         .read = ReadMimo};

}  // namespace moeserve

// Step 3.5 and 3.7 (text): a gate of each head, more heads in layers with a window, and limits of
// the experts' activations that differ between layers.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule Offset3(std::string_view model, std::string_view file) {
  return {.model = model, .file = file, .add = 1.0f};
}

constexpr TensorRule kStep3Tensors[] = {
    Offset3("norm.weight", "model.norm.weight"),
    Offset3("blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"),
    Offset3("blocks.*.feed_forward.norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    Offset3("blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"),
    Offset3("blocks.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"),
    {"blocks.*.attention.gate.weight", "model.layers.*.self_attn.g_proj.weight"},
    // The names on the hub.
    {"blocks.*.feed_forward.router.weight", "model.layers.*.moe.gate.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.moe.router_bias"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "model.layers.*.moe.gate_proj.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.moe.up_proj.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.moe.down_proj.weight"},
    {"blocks.*.feed_forward.shared.gate.weight", "model.layers.*.share_expert.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.share_expert.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "model.layers.*.share_expert.down_proj.weight"},
};

// Returns the file with one name for each key, and without the elements that lists have for layers
// which predict further tokens.
Json Unified(const Json& json) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"num_local_experts", "n_routed_experts"}, {"moe_num_experts", "n_routed_experts"},
      {"moe_top_k", "num_experts_per_tok"},      {"num_attention_groups", "num_key_value_heads"},
      {"share_expert_dims", "share_expert_dim"}, {"num_mtp_layers", "num_nextn_predict_layers"}};
  Json out = json;
  for (const auto& [old, name] : kNames) {
    if (!out.contains(old)) continue;
    if (!out.contains(name)) out[name] = out[old];
    if (out[old] == out[name]) out.erase(old);
  }
  const auto layers = out.find("num_hidden_layers");
  const std::optional<int> count = layers == out.end() ? std::nullopt : IntFrom(*layers);
  for (const char* key : {"layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared",
                          "rope_theta", "partial_rotary_factors"}) {
    const auto list = out.find(key);
    if (list == out.end() || !list->is_array() || count.value_or(0) < 1) continue;
    const auto keep = static_cast<size_t>(*count);
    if (list->size() > keep) list->erase(list->begin() + *count, list->end());
  }
  return out;
}

// Returns the number for a layer: element `layer` of a list, or a number for all layers.
double NumberOf(DecoderConfig& c, const Json& json, const char* key, int layer, double fallback) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return fallback;
  const bool list = found->is_array();
  const auto index = static_cast<size_t>(layer);
  if (list && index < found->size() && (*found)[index].is_null()) return fallback;
  if (!list && found->is_number()) return found->get<double>();
  if (list && index < found->size() && (*found)[index].is_number()) {
    return (*found)[index].get<double>();
  }
  if (layer == 0 || (list && index == found->size())) {
    c.keys().Fault(key, "a number, or a list with a number for each layer", ShowJson(*found));
  }
  return fallback;
}

std::vector<int> SparseLayers(DecoderConfig& c, const Json& json) {
  const auto list = json.find("moe_layers_enum");
  std::vector<bool> sparse;
  if (list != json.end() && !list->is_null()) {
    c.keys().Optional("moe_layers_enum");
    sparse.assign(static_cast<size_t>(std::clamp(c.layers(), 0, kMaxLayers)), false);
    const auto add = [&](int layer) {
      if (layer >= 0 && static_cast<size_t>(layer) < sparse.size()) {
        sparse[static_cast<size_t>(layer)] = true;
      }
    };
    bool valid = list->is_string() || list->is_array();
    if (list->is_array()) {
      for (const Json& item : *list) {
        valid = valid && IntFrom(item).has_value();
        add(IntFrom(item).value_or(-1));
      }
    } else if (valid) {
      std::string_view text = list->get_ref<const std::string&>();
      while (valid && !text.empty()) {
        int layer = -1;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), layer);
        valid = error == std::errc();
        add(layer);
        text.remove_prefix(static_cast<size_t>(end - text.data()));
        if (!text.empty() && text.front() != ',') valid = false;
        if (!text.empty()) text.remove_prefix(1);
      }
    }
    if (!valid) c.keys().Fault("moe_layers_enum", "numbers of layers", ShowJson(*list));
  }
  return LayerKinds(
      c, {{"dense", 0}, {"sparse", 1}},
      [&](int layer) {
        const auto index = static_cast<size_t>(layer);
        return sparse.empty() ? layer >= 3 : index < sparse.size() && sparse[index];
      },
      "mlp_layer_types");
}

// Returns the rotary positions of each layer, from keys that Skeleton() has not seen.
std::vector<PositionSpec> Step3Positions(DecoderConfig& c, const Json& json,
                                         const std::vector<bool>& sliding, int head_dim) {
  const auto parameters = json.find("rope_parameters");
  const bool of_layers = parameters != json.end() && DecoderConfig::IsRopeOfLayers(*parameters);
  const auto type_of = [&](size_t i) {
    return sliding[i] ? "sliding_attention" : "full_attention";
  };
  bool complete = of_layers;
  for (size_t i = 0; of_layers && i < sliding.size(); ++i) {
    const auto own = parameters->find(type_of(i));
    complete = complete && own != parameters->end() && own->is_object();
  }
  if (parameters != json.end() && !parameters->is_null() && !complete) {
    c.keys().Fault("rope_parameters", "an object for each type of layer", ShowJson(*parameters));
  }
  std::vector<PositionSpec> positions;
  for (size_t i = 0; i < sliding.size(); ++i) {
    const std::string type = type_of(i);
    const auto first = std::find(sliding.begin(), sliding.end(), sliding[i]) - sliding.begin();
    if (static_cast<size_t>(first) < i) {
      positions.push_back(positions[static_cast<size_t>(first)]);
      continue;
    }
    Json own = Json::object();
    std::string path = "rope_scaling";
    if (of_layers) {
      own = complete ? (*parameters)[type] : Json::object();
      path = Concat("rope_parameters.", type);
    } else {
      const auto scaling = json.find("rope_scaling");
      if (!sliding[i] && scaling != json.end() && scaling->is_object()) own = *scaling;
      const int layer = static_cast<int>(i);
      if (!own.contains("rope_theta")) {
        own["rope_theta"] = NumberOf(c, json, "rope_theta", layer, 10000.0);
      }
      if (!own.contains("partial_rotary_factor")) {
        own["partial_rotary_factor"] = NumberOf(c, json, "partial_rotary_factors", layer, 1.0);
      }
    }
    if (!c.ok()) return std::vector<PositionSpec>(sliding.size());
    PositionSpec position = c.RopeFrom(own, path, 10000.0);
    if (head_dim > 0) position.fraction = std::floor(position.fraction * head_dim) / head_dim;
    positions.push_back(position);
  }
  return positions;
}

AttentionSpec ReadAttention3(DecoderConfig& c) {
  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  const double scalar = c.keys().Real("query_pre_attn_scalar", attention.head_dim);
  if (scalar > 0) attention.scale = 1.0 / std::sqrt(scalar);
  attention.qk_norm = QkNorm::kHead;
  attention.gate = attention.gate_per_head = true;
  for (const char* key : {"gating", "use_head_wise_attn_gate", "use_qk_norm", "zero_centered",
                          "use_moe", "use_moe_router_bias", "norm_expert_weight"}) {
    c.Require(key, true);
  }
  c.Require("sink", false);
  c.Require("att_impl_type", "GQA");
  c.Require("use_rope_layers", Json::array());
  c.Require("yarn_only_types", Json::array({"full_attention"}));
  c.Require("moe_router_activation", "sigmoid");
  c.Require("moe_every_n_layer", 1);
  c.Require("mlp_bias", false);
  c.Ignore({"hidden_act", "need_fp32_gate", "moe_layer_offset", "mtp_layer_types",
            "mtp_mlp_layer_types"});
  return attention;
}

// Returns the number of heads in layers with a window.
int SlidingHeads(DecoderConfig& c, int heads) {
  const Json* const other = c.keys().Optional("attention_other_setting");
  if (other != nullptr && other->is_object()) {
    const auto found = other->find("num_attention_heads");
    if (found != other->end()) heads = IntFrom(*found).value_or(0);
  } else if (other != nullptr) {
    c.keys().Fault("attention_other_setting", "an object", ShowJson(*other));
  }
  return c.keys().Int("num_sliding_attention_heads", heads);
}

ConfigResult ReadStep3(const Json& json, const StoredNames& stored) {
  const Json unified = Unified(json);
  Json rest = unified;
  for (const char* key : {"rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factors",
                          "swiglu_limits", "swiglu_limits_shared"}) {
    if (rest.is_object()) rest.erase(key);
  }
  DecoderConfig c(rest, stored);
  c.Skeleton({.max_position_embeddings = 128000,
              .rms_norm_eps = 1e-5,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 8});
  const AttentionSpec attention = ReadAttention3(c);
  const std::vector<bool> sliding = c.SlidingLayers([](int) { return false; });
  const std::optional<int> window = c.Window();
  const int sliding_heads = SlidingHeads(c, attention.num_heads);
  const std::vector<LayerOverrides> overrides = PerLayerConfig(c);
  const std::vector<int> sparse = SparseLayers(c, unified);
  const std::vector<PositionSpec> positions =
      Step3Positions(c, unified, sliding, attention.head_dim);

  FeedForwardSpec dense = c.Dense();
  dense.expert.limit_after = true;
  FeedForwardSpec experts = c.Experts({.count = "n_routed_experts"});
  experts.expert.limit_after = true;
  RoutedLayerSpec& routing = *experts.routing;
  routing.gate = GateKind::kSigmoid;
  routing.select.bias = true;
  routing.renormalize = true;
  routing.scale = c.keys().Real("moe_router_scaling_factor", 1.0);
  experts.shared_width = c.keys().Int("share_expert_dim", 1280);
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 0));
  std::vector<float> limits, shared_limits;
  for (int i = 0; i < static_cast<int>(sliding.size()); ++i) {
    limits.push_back(static_cast<float>(NumberOf(c, unified, "swiglu_limits", i, 0.0)));
    shared_limits.push_back(
        static_cast<float>(NumberOf(c, unified, "swiglu_limits_shared", i, 0.0)));
  }
  constexpr KeyRule kRules[] = {{"feed_forward.shared_width", "share_expert_dim"},
                                {"feed_forward.shared_limit", "swiglu_limits_shared"},
                                {"feed_forward.expert.activation_limit", "swiglu_limits"},
                                {"feed_forward.routing.scale", "moe_router_scaling_factor"},
                                {"attention.num_heads", "num_sliding_attention_heads"}};
  c.Keys(kRules);
  c.Tensors({kStep3Tensors, EmbeddingTensors(), AttentionTensors(), DenseTensors(), ExpertTensors(),
             SharedExpertTensors()});
  return c.Finish([&](int layer) {
    const auto index = static_cast<size_t>(layer);
    AttentionSpec own = attention;
    if (sliding[index]) {
      own.window = window;
      own.num_heads = sliding_heads;
    }
    if (index < overrides.size()) overrides[index].Apply(own);
    own.position = positions[index];
    FeedForwardSpec second = sparse[index] == 1 ? experts : dense;
    second.expert.activation_limit = sparse[index] == 1 ? limits[index] : shared_limits[index];
    if (sparse[index] == 1 && shared_limits[index] != limits[index]) {
      second.shared_limit = shared_limits[index];
    }
    return LayerSpec{own, second};
  });
}

}  // namespace

constinit const Architecture kStep3Architecture = {.model_type = "step3p5", .read = ReadStep3};

}  // namespace moeserve

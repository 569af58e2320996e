#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "engine/spec/spec_limits.h"

namespace moeserve::huggingface {

using Json = nlohmann::json;

std::vector<int> LayerKinds(DecoderConfig& config, std::initializer_list<LayerKindName> names,
                            const std::function<int(int)>& fallback, std::string_view key,
                            std::initializer_list<std::string_view> others) {
  const int layers = std::clamp(config.layers(), 0, kMaxLayers);
  std::vector<int> kinds(static_cast<size_t>(layers), 0);
  const std::string expected = Concat("a list of ", layers, " strings");
  ObjectReader& keys = config.keys();
  const Json* list = keys.Optional(key);
  std::string_view found = key;
  for (const std::string_view other : others) {
    const Json* const old = keys.Optional(other);
    if (list == nullptr && old != nullptr) {
      list = old;
      found = other;
    }
  }
  if (list == nullptr) {
    if (fallback == nullptr) {
      keys.Required(key, expected);
      return kinds;
    }
    for (int i = 0; i < layers; ++i) kinds[static_cast<size_t>(i)] = fallback(i);
    return kinds;
  }
  if (!list->is_array() || list->size() != kinds.size()) {
    keys.Fault(found, expected, ShowJson(*list));
    return kinds;
  }
  std::string known;
  for (const LayerKindName& name : names) {
    known.append(known.empty() ? "" : name.name == (names.end() - 1)->name ? " or " : ", ");
    known.append(Quoted(name.name));
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto name = std::ranges::find_if(
        names, [&](const LayerKindName& n) { return (*list)[i] == Json(std::string(n.name)); });
    if (name == names.end()) {
      keys.Fault(Concat(found, '[', i, ']'), known, ShowJson((*list)[i]));
    } else {
      kinds[i] = name->kind;
    }
  }
  return kinds;
}

void LayerOverrides::Apply(AttentionSpec& attention) const {
  attention.num_heads = heads.value_or(attention.num_heads);
  attention.num_kv_heads = kv_heads.value_or(attention.num_kv_heads);
  attention.head_dim = head_dim.value_or(attention.head_dim);
}

void LayerOverrides::Apply(FeedForwardSpec& dense) const {
  dense.width = width.value_or(dense.width);
}

std::vector<LayerOverrides> PerLayerConfig(DecoderConfig& config) {
  constexpr std::string_view kKey = "per_layer_config";
  ObjectReader& keys = config.keys();
  const Json* const json = keys.Optional(kKey);
  if (json == nullptr) return {};
  const int layers = std::clamp(config.layers(), 0, kMaxLayers);
  std::vector<LayerOverrides> overrides(static_cast<size_t>(layers));
  if (!json->is_object()) {
    keys.Fault(kKey, "an object", ShowJson(*json));
    return overrides;
  }
  for (const auto& [name, value] : json->items()) {
    int layer = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
    if (error != std::errc() || end != name.data() + name.size() || layer < 0 || layer >= layers) {
      keys.Fault(kKey, Concat("numbers of layers below ", layers), Quoted(name));
      continue;
    }
    ObjectReader reader(value, Concat(kKey, '.', name), &config.problems());
    LayerOverrides& own = overrides[static_cast<size_t>(layer)];
    const auto read = [&](std::string_view key, std::optional<int>& to) {
      const Json* const found = reader.Optional(key);
      if (found != nullptr && !found->is_null()) to = reader.Int(key);
    };
    read("num_attention_heads", own.heads);
    read("num_key_value_heads", own.kv_heads);
    read("head_dim", own.head_dim);
    read("intermediate_size", own.width);
    reader.RefuseOthers();
  }
  return overrides;
}

}  // namespace moeserve::huggingface

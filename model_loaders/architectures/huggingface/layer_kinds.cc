#include "model_loaders/architectures/huggingface/layer_kinds.h"

#include <algorithm>
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

std::function<bool(int)> RoutedLayers(DecoderConfig& config) {
  std::vector<int> dense_layers;
  if (const Json* list = config.keys().Optional("mlp_only_layers")) {
    bool valid = list->is_array();
    for (size_t i = 0; valid && i < list->size(); ++i) {
      const std::optional<int> layer = IntFrom((*list)[i]);
      valid = layer.has_value();
      dense_layers.push_back(layer.value_or(0));
    }
    if (!valid) config.keys().Fault("mlp_only_layers", "a list of integers", ShowJson(*list));
  }
  const int step = config.keys().Int("decoder_sparse_step", 1);
  if (step < 1) {
    config.keys().Fault("decoder_sparse_step", "an integer >= 1", std::to_string(step));
  }
  return [dense_layers, step](int layer) {
    return std::find(dense_layers.begin(), dense_layers.end(), layer) == dense_layers.end() &&
           (layer + 1) % step == 0;
  };
}

}  // namespace moeserve::huggingface

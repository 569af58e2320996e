// Keys that are lists with an entry for each layer.

#include <algorithm>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

std::string OneOf(std::span<const std::string_view> names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += Quoted(names[i]);
  }
  return text;
}

}  // namespace

std::optional<std::vector<int>> DecoderConfig::LayerNames(std::string_view key,
                                                          std::span<const std::string_view> names) {
  const Json* const list = reader_.Optional(key);
  if (list == nullptr || layers_ < 1 || layers_ > kMaxLayers) return std::nullopt;
  std::vector<int> found(static_cast<size_t>(layers_), 0);
  if (!list->is_array() || list->size() != found.size()) {
    reader_.Fault(key, Concat("a list of ", layers_, " strings"), ShowJson(*list));
    return found;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    const Json& entry = (*list)[i];
    const auto name = std::ranges::find_if(names, [&](std::string_view n) { return entry == n; });
    if (name != names.end()) {
      found[i] = static_cast<int>(name - names.begin());
    } else {
      reader_.Fault(Concat(key, '[', i, ']'), OneOf(names), ShowJson(entry));
    }
  }
  return found;
}

std::vector<bool> DecoderConfig::LayersOf(std::string_view key, std::string_view no,
                                          std::string_view yes,
                                          const std::function<bool(int)>& fallback) {
  const std::string_view names[] = {no, yes};
  const std::optional<std::vector<int>> list = LayerNames(key, names);
  if (list.has_value()) return {list->begin(), list->end()};
  std::vector<bool> layers;
  if (layers_ > kMaxLayers) return layers;
  for (int i = 0; i < layers_; ++i) layers.push_back(fallback(i));
  return layers;
}

std::vector<bool> DecoderConfig::SlidingLayers(const std::function<bool(int)>& fallback) {
  return LayersOf("layer_types", "full_attention", "sliding_attention", fallback);
}

std::vector<bool> DecoderConfig::SparseLayers(const std::function<bool(int)>& fallback) {
  return LayersOf("mlp_layer_types", "dense", "sparse", fallback);
}

std::vector<bool> DecoderConfig::SparseFrom(int default_first) {
  const int first = reader_.Int("first_k_dense_replace", default_first);
  return SparseLayers([first](int layer) { return layer >= first; });
}

std::function<bool(int)> DecoderConfig::SparseByStep(std::vector<int> dense_layers) {
  if (const Json* list = reader_.Optional("mlp_only_layers")) {
    bool valid = list->is_array();
    dense_layers.clear();
    for (size_t i = 0; valid && i < list->size(); ++i) {
      const std::optional<int> layer = IntFrom((*list)[i]);
      valid = layer.has_value();
      dense_layers.push_back(layer.value_or(0));
    }
    if (!valid) reader_.Fault("mlp_only_layers", "a list of integers", ShowJson(*list));
  }
  const int step = reader_.Int("decoder_sparse_step", 1);
  if (step < 1) reader_.Fault("decoder_sparse_step", "an integer >= 1", std::to_string(step));
  return [dense_layers, step](int layer) {
    return std::ranges::find(dense_layers, layer) == dense_layers.end() && (layer + 1) % step == 0;
  };
}

}  // namespace moeserve::huggingface

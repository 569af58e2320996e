// Which layers of a model are of which kind.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {

// A kind of layer, and one of the names that files have for it.
struct LayerKindName {
  std::string_view name;
  int kind = 0;
};

// Reads the kind of each layer from the list `key` ("layer_types"), which may have one of the
// older names `others`. Without a list, `fallback` returns the kind of a layer; if it is null, the
// list is required. Reports other names, and lists of another length; the result is then one of
// zeros. If there are as many kinds as layers, the result has an element for each layer.
std::vector<int> LayerKinds(DecoderConfig& config, std::initializer_list<LayerKindName> names,
                            const std::function<int(int)>& fallback,
                            std::string_view key = "layer_types",
                            std::initializer_list<std::string_view> others = {});

// What "per_layer_config" says of one layer.
struct LayerOverrides {
  std::optional<int> heads, kv_heads, head_dim, width;

  // Replaces the settings that have a value.
  void Apply(AttentionSpec& attention) const;
  void Apply(FeedForwardSpec& dense) const;
};

// Reads "per_layer_config", an object with an object for some layers by their number. Returns one
// element for each layer; none without the key.
std::vector<LayerOverrides> PerLayerConfig(DecoderConfig& config);

}  // namespace moeserve::huggingface

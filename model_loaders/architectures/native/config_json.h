// config.json of the native format.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"

namespace moeserve {

// The files store every tensor by itself, under the model's name for it.
struct NativeConfig final : CheckpointConfig {
  // Whether the file has a list with one entry per layer, or one object for all layers.
  bool attention_is_list = false;
  bool feed_forward_is_list = false;
  // Whether the file has prediction layers that `spec` does not have, because nobody wants them.
  bool leaves_prediction = false;

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;
  std::optional<std::string> LeftOverReason(std::string_view name) const override;
  // Replaces "attention[0].head_dim", for example, by "attention.head_dim" if the file has one
  // object for all layers.
  std::string AsInFile(std::string_view text) const override;
};

// Parses and validates the text of a config.json. InvalidArgument with the path of the key, the
// expected and the found value; the message begins with "config.json: " and lists several errors at
// once.
Result<NativeConfig> ParseNativeConfig(std::string_view text);

}  // namespace moeserve

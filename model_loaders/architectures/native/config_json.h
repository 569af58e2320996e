// config.json of the native format.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"

namespace moeserve {

// Tensors are stored under the model's names, each by itself.
struct NativeConfig final : CheckpointConfig {
  // Whether the file gives these as a list with one entry per layer, or as one object for all.
  bool attention_is_list = false;
  bool feed_forward_is_list = false;

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;
  std::optional<std::string> LeftOverReason(std::string_view name) const override;
  // "attention[0].head_dim" is "attention.head_dim" where there is one object for all layers.
  std::string AsInFile(std::string_view text) const override;
};

// Parses and validates the text of a config.json. InvalidArgument with the path of the key,
// expected and found; the message begins with "config.json: ". Lists several faults together.
Result<NativeConfig> ParseNativeConfig(std::string_view text);

}  // namespace moeserve

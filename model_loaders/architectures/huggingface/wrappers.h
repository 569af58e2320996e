// Folders of models that read text and something else, such as images: their decoder is one of the
// families here, and config.json has its keys in the object "text_config". The other parts are not
// computed.
#pragma once

#include <span>
#include <string_view>

#include "model_loaders/architectures/architecture.h"
#include "nlohmann/json.hpp"

namespace moeserve::huggingface {

struct Wrapper {
  std::string_view model_type;
  // The values of "model_type" that text_config may have; the first, if it has none.
  std::span<const std::string_view> text_types;
  // How names of tensors begin that belong to other parts. They are ignored, and no others are.
  std::span<const std::string_view> other_parts;
};

// All wrappers, by name. One whose decoder has no reader yet is refused when it is read.
std::span<const Wrapper> Wrappers();
// Returns the wrapper that a configuration belongs to; null if it is none.
const Wrapper* FindWrapper(const nlohmann::json& config);

// Returns whether `type` is the model_type of a wrapper's decoder.
bool IsTextType(std::string_view type);

// Returns the error about a decoder of `wrapper` that none of `families` recognizes. `text` is its
// configuration.
using UnknownDecoder = absl::Status (*)(std::string_view wrapper, const nlohmann::json& text,
                                        ArchitectureList families);

// Reads the configuration of a wrapper: the decoder's by one of `families`, with "architectures"
// and "quantization_config" of the whole file, and its "eos_token_id" as further ends.
// InvalidArgument with key, expected and found value, as from other readers, or what `unknown`
// returns.
ConfigResult ReadWrapped(const Wrapper& wrapper, const nlohmann::json& config,
                         const StoredNames& stored, ArchitectureList families,
                         UnknownDecoder unknown);

// Reads a decoder's configuration by `family`, where the files may call its tensors as in a
// wrapper.
ConfigResult ReadAlone(const Architecture& family, const nlohmann::json& config,
                       const StoredNames& stored);

}  // namespace moeserve::huggingface

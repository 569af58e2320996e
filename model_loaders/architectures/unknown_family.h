// The answer to a config.json that no reader recognizes: what the model is, as far as it is known,
// what is missing here, and which family that is read comes nearest to it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "model_loaders/architectures/architecture.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// A family of models that is known, but not read.
struct UnsupportedFamily {
  std::string_view model_type;
  std::string_view part;     // of its models that is not computed; "" if only a reader is missing
  std::string_view nearest;  // a family that is read; "" if none is near
};
std::span<const UnsupportedFamily> UnsupportedFamilies();

// Returns InvalidArgument for a configuration that none of the families `known` recognizes. Takes
// any JSON value. The message has one line and begins with "config.json: ".
absl::Status UnknownFamily(const nlohmann::json& config, ArchitectureList known);

// Does the same for the decoder of a known wrapper (huggingface/wrappers.h); `text` is its
// configuration, with a model_type.
absl::Status UnknownText(std::string_view wrapper, const nlohmann::json& text,
                         ArchitectureList known);

}  // namespace moeserve

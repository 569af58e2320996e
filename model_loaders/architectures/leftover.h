// Explains why a tensor of a folder does not belong to the model. Names are the model's tensor
// names (RequiredTensors()), not those of a family's files.
#pragma once

#include <string>
#include <string_view>

#include "engine/spec/spec.h"

namespace moeserve {

// The explanation for a tensor that no setting of the configuration mentions.
inline constexpr std::string_view kUnknownTensor =
    "no key of the configuration leads to a tensor of this name";

// Returns the setting that excludes the tensor, such as "feed_forward[1].routing.num_experts is 8",
// or kUnknownTensor. `name` must not be one of RequiredTensors(spec).
std::string WhyLeftOver(std::string_view name, const ModelSpec& spec);

}  // namespace moeserve

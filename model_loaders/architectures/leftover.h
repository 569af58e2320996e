// Explains tensors of a folder that do not belong to its model. Names are those of the model
// (RequiredTensors()), not of a family's files.
#pragma once

#include <string>
#include <string_view>

#include "engine/spec/spec.h"

namespace moeserve {

// Reported for a tensor of the files that no key of the configuration implies.
inline constexpr std::string_view kUnknownTensor =
    "no key of the configuration leads to a tensor of this name";

// The setting that excludes the tensor ("feed_forward[1].routing.num_experts is 8"), or
// kUnknownTensor. `name` is not one of RequiredTensors(spec).
std::string WhyLeftOver(std::string_view name, const ModelSpec& spec);

}  // namespace moeserve

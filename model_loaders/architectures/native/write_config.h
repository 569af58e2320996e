// Writes a specification as a config.json of the native format.
#pragma once

#include "engine/spec/spec.h"
#include "kernels/base/quantization.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// Returns the config.json of a valid spec, with the keys in the order in which
// model_loaders/README.md documents them. ParseNativeConfig() reads the same spec back, to the last
// bit of every number; members that the spec's kinds do not use, such as the theta of learned
// positions, are not written and have their defaults afterwards. Most settings that equal their
// default are left out. If the blocks of all layers are equal, they are written once.
// `quantization` is the type in which the folder stores its matrices.
nlohmann::ordered_json NativeConfigJson(const ModelSpec& spec,
                                        Quantization quantization = Quantization::kNone);

}  // namespace moeserve

// The part of Validate() that concerns positions.
#pragma once

#include <string>

#include "engine/spec/checker.h"
#include "engine/spec/spec.h"

namespace moeserve {

// Checks ModelSpec::position, but not how it fits the heads of the layers.
void CheckPosition(Checker& check, const ModelSpec& spec);

// Checks ModelSpec::relative_bias, but not whether the layers can have it.
void CheckRelativeBias(Checker& check, const ModelSpec& spec);

// Check that the rotated dimensions fit the heads of a layer, and that the layer can have the
// biases of relative positions. `scope` is the path of the layer's attention object.
void CheckRopeOfLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const AttentionSpec& attention);
void CheckBiasOfLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const AttentionSpec& attention);

}  // namespace moeserve

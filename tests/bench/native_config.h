// Converts a spec of a synthetic model to the contents of config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "engine/spec/spec.h"

namespace moeserve::testing {

// Returns a config.json from which the loader reads `spec` and `eos_token_id`. All layers must be
// equal. Settings that no flag of synthetic models changes must have the format's default values.
nlohmann::json NativeConfig(const ModelSpec& spec, int32_t eos_token_id);

}  // namespace moeserve::testing

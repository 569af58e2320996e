// Writes the config.json of a spec, for the settings that synthetic models use.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "engine/spec/spec.h"

namespace moeserve::testing {

// Requires that all layers are equal. Settings that no flag of synthetic models changes must have
// the format's defaults. Reading the result returns `spec` with that end-of-text id.
nlohmann::json NativeConfig(const ModelSpec& spec, int32_t eos_token_id);

}  // namespace moeserve::testing

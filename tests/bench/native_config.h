// The config.json of a specification, as far as synthetic models use the format.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "engine/spec/spec.h"

namespace moeserve::testing {

// For models whose layers are equal, with the defaults of the format where synthetic models have
// no flag of their own. Reading the result gives `spec` with that end-of-text id.
nlohmann::json NativeConfig(const ModelSpec& spec, int32_t eos_token_id);

}  // namespace moeserve::testing

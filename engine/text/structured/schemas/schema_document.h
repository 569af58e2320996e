// Reads the text of a JSON schema.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/status.h"
#include "engine/text/structured/constraint.h"

namespace moeserve::structured {

// Returns the schema, an object or a boolean. InvalidArgument if `text` is too long, nested too
// deep, or not valid JSON, or if a key stands twice in an object.
Result<nlohmann::json> ParseSchema(std::string_view text, const ConstraintLimits& limits);

}  // namespace moeserve::structured

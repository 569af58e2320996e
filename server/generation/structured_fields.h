// The request fields that ask for structured output, all of them names for one ConstraintSpec.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"
#include "engine/text/structured/constraint.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

struct ConstraintField {
  ConstraintSpec spec;
  std::string param;  // the request field that it came from, for messages
};

// Reads `response_format` (text, json_object, json_schema), `structured_outputs` (json,
// json_object, regex, choice) and the older guided_json, guided_regex and guided_choice. None: the
// text is free. The error names the field; more than one constraint is an error. Compiles nothing.
Result<std::optional<ConstraintField>> ParseConstraint(const nlohmann::json& body);

}  // namespace moeserve::server

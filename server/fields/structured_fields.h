// The request fields for structured output. All of them are converted to one ConstraintSpec.
#pragma once

#include <optional>
#include <string_view>

#include "base/status.h"
#include "server/base/json.h"
#include "server/generation/constraint_compiler.h"

namespace moeserve::server {

// Reads `response_format` (text, json_object, json_schema, structural_tag), `structured_outputs`
// (json, json_object, regex, choice, grammar, structural_tag) and the older guided_json,
// guided_regex, guided_choice and guided_grammar. Returns
// nullopt if no field constrains the text. An error names the field; more than one constraint is an
// error. Does not compile the constraint. `body` was parsed from `text`, from which the order of
// the properties of schemas is read; if it is not there, they are sorted by name.
Result<std::optional<ConstraintField>> ParseConstraint(const Json& body,
                                                       std::string_view text = {});

}  // namespace moeserve::server

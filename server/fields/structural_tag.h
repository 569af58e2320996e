// Structural tags: JSON descriptions of texts with tagged regions, in the forms of vLLM and
// XGrammar.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/text/structured/constraint.h"
#include "server/base/json.h"

namespace moeserve::server {

// Reads a structural tag, which is sent as an object or as a string that contains JSON. Two forms
// are accepted:
// - {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text with tags;
// - {"format": F}, where F has a "type": const_string (value), any_text (excludes), json_schema
//   (json_schema), regex (pattern), grammar (grammar), sequence and or (elements), tag (begin,
//   content, end), triggered_tags (triggers, tags, at_least_one, stop_after_first, excludes) or
//   tags_with_separator (tags, separator, at_least_one, stop_after_first).
// Both may have "type": "structural_tag". Errors name the field, whose name begins with `param`.
Result<ConstraintSpec> StructuralTagSpec(const Json& value, const std::string& param);

// Replaces the schemas in a structural tag by their texts, which keep the order of properties.
void SpellSchemas(OrderedJson& value);

}  // namespace moeserve::server

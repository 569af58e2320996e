// A short notation for schemas.
#pragma once

#include <string_view>

#include "server/base/json.h"

namespace moeserve::server::http {

// Returns the schemas that `text` contains, a JSON object of schemas by their names. A schema is
// one of these:
// - A text: alternatives separated by " | ". An alternative is a type of JSON Schema, with or
//   without a bound ("integer >= 1"); "count", an integer from 0; "time", an RFC 3339 time; "any";
//   "true"; "false"; a constant in single quotes; the name of a schema, which starts with a capital
//   letter; or "[T]", an array of T.
// - An object of members. One whose name ends in '?' may be absent. The member "..." is the schema
//   of all others; it can be "none".
// - An array of one schema: an array of such values.
// - An array of a schema and what is added to it: null (the value may be null), a description, or
//   an object of further keywords.
// `text` must be valid.
OrderedJson ParseSchemas(std::string_view text);

}  // namespace moeserve::server::http

// A parser for untrusted JSON, with limits. Refuses ambiguous texts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"
#include "nlohmann/json.hpp"

namespace moeserve {

struct JsonLimits {
  size_t max_bytes = size_t{16} << 20;
  int max_depth = 64;                   // of nested lists and objects
  size_t max_values = size_t{1} << 20;  // lists, objects and scalars together
};

// Parses exactly one JSON text. Refuses, with the position: a text beyond a limit, a syntax error,
// invalid UTF-8, a lone surrogate, a number outside the range of double, NaN and Infinity, a byte
// order mark, text after the value, and a key that occurs twice in an object. Throws only
// std::bad_alloc. In the result, is_number_integer() is true for 3 and false for 3.0.
Result<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits = {});

// Formats a value for error messages: as printable ASCII, or as its kind and size if it is long or
// nested.
std::string ShowJson(const nlohmann::json& value);

}  // namespace moeserve

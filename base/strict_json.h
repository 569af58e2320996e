// A parser for untrusted JSON, with limits. Refuses ambiguous texts.
#pragma once

#include <cstddef>
#include <functional>
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

// Called by the parser before it allocates memory for values, with an estimate of the size, at
// least some KiB at a time. Returns false to end the parsing.
using TakeMemory = std::function<bool(size_t bytes)>;

// Parses exactly one JSON text. Refuses, with the position: a text beyond a limit, a syntax error,
// invalid UTF-8, a lone surrogate, a number outside the range of double, NaN and Infinity, a byte
// order mark, text after the value, and a key that occurs twice in an object; ResourceExhausted if
// `take_memory`, which may be empty, returned false. Throws only std::bad_alloc. In the result,
// is_number_integer() is true for 3 and false for 3.0.
Result<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits = {},
                                       const TakeMemory& take_memory = nullptr);

// Empties `value` without allocating memory. The destructor of a filled list or object allocates,
// and ends the process if that fails.
void ClearJson(nlohmann::json& value) noexcept;

// Formats a value for error messages: as printable ASCII, or as its kind and size if it is long or
// nested.
std::string ShowJson(const nlohmann::json& value);

}  // namespace moeserve

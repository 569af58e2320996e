// JSON from untrusted sources: a parser with limits that refuses what is ambiguous.
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

// Parses exactly one JSON text. Refuses, with a message that says where: a limit exceeded, a syntax
// error, invalid UTF-8, a lone surrogate, a number beyond the range of double, NaN and Infinity, a
// byte order mark, text after the value, and an object that has a key twice. Never throws, except
// std::bad_alloc. Integers keep their type: 3 is_number_integer(), 3.0 does not.
Result<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits = {});

// A value as messages show it: short printable ASCII, long or nested values by kind and size.
std::string ShowJson(const nlohmann::json& value);

}  // namespace moeserve

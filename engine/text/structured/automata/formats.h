// Patterns for the values of JSON Schema's keyword "format".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace moeserve::structured {

// Returns a pattern for the whole string; nullopt if the format is not supported. Every match has
// the format, but rare spellings of e-mail addresses do not match.
std::optional<std::string> FormatPattern(std::string_view format);

}  // namespace moeserve::structured

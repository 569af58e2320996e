// Patterns of the values of JSON Schema's "format".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace moeserve::structured {

// A pattern for the whole string, nullopt for an unsupported format. Every match has the format;
// rare spellings of e-mail addresses do not match.
std::optional<std::string> FormatPattern(std::string_view format);

}  // namespace moeserve::structured

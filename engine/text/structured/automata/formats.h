// Patterns of the values of JSON Schema's "format".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace moeserve::structured {

// A pattern for the whole string, nullopt for a format that is not supported. Every string that it
// matches has the format; rare spellings of the mail formats are left out.
std::optional<std::string> FormatPattern(std::string_view format);

}  // namespace moeserve::structured

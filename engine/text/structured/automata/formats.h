// Patterns for the values of JSON Schema's keyword "format".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace moeserve::structured {

// Returns a pattern for the whole string; nullopt if the format is not supported. Every match has
// the format, but rare spellings do not match: of e-mail addresses and host names, those that are
// long or not ASCII; of URIs, those with an IP address of version 6 or with other characters than
// ASCII; of times, those with leap seconds; of regular expressions, those with nested groups.
std::optional<std::string> FormatPattern(std::string_view format);

// Returns the names of all formats, for an error message.
std::string SupportedFormats();

}  // namespace moeserve::structured

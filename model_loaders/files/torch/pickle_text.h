// Decodes the strings of pickles of protocol 0, which are written as text.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve {

// Decodes a string literal of Python 2, such as 'a\n'. Accepts the escapes that Python's repr()
// writes. InvalidArgument for anything else.
Result<std::string> UnquotePickleString(std::string_view line);

// Decodes Latin-1 with the escapes \uXXXX and \UXXXXXXXX to UTF-8. InvalidArgument for an
// incomplete escape and for a number that is no code point.
Result<std::string> UnescapePickleUnicode(std::string_view line);

}  // namespace moeserve

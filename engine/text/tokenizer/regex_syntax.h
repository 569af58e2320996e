// Translates the patterns of tokenizer files, which are written for Oniguruma (Ruby's syntax), to
// PCRE2. Both engines accept these patterns but differ in the meaning of some constructs: the
// version of Unicode, \s, \h, \v, $, x{2}+, set operations inside brackets. The translated pattern
// contains only constructs for which PCRE2 is known to do the same as Oniguruma.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace moeserve {

// Returns the PCRE2 pattern (for UTF, UCP, MULTILINE, newline LF) that matches as Oniguruma matches
// `pattern`. InvalidArgument names the first construct that is wrong or has no exact translation.
absl::StatusOr<std::string> TranslateRegex(std::string_view pattern);

// Returns the PCRE2 pattern that matches exactly `text`.
std::string LiteralRegex(std::string_view text);

// Returns a bracket class for one character: \w as Rust's regular expressions define it.
std::string RustWordClass();

// Returns a bracket class for one character: what Rust's char::is_numeric accepts, by the tables of
// Unicode 17.
std::string RustNumericClass();

// Returns whether the code point has Unicode's property White_Space.
bool IsWhiteSpace(char32_t code_point);

// Returns the end of the white space that starts at byte `begin` of `text`, which must be UTF-8.
size_t SkipWhiteSpace(std::string_view text, size_t begin);

// Returns the start of the white space that ends at byte `end`.
size_t SkipWhiteSpaceBackwards(std::string_view text, size_t end);

}  // namespace moeserve

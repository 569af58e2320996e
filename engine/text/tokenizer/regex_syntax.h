// Patterns in tokenizer files are written for Oniguruma (Ruby's syntax); we run PCRE2. The two
// agree on most of what such patterns use and differ quietly on the rest: which Unicode version
// they know, what \s, \h, \v, $ and x{2}+ mean, set operations inside brackets. So a pattern is
// parsed here and written anew with nothing in it that PCRE2 would read differently.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace moeserve {

// The PCRE2 pattern (for UTF, UCP, MULTILINE, newline LF) that matches as Oniguruma matches
// `pattern`. InvalidArgument names the first construct that is wrong or has no exact translation.
absl::StatusOr<std::string> TranslateRegex(std::string_view pattern);

// The PCRE2 pattern that matches exactly `text`.
std::string LiteralRegex(std::string_view text);

// A class of one character: \w as Rust's regular expressions define it.
std::string RustWordClass();

// A class of one character: what Rust's char::is_numeric accepts, by the tables of Unicode 17.
std::string RustNumericClass();

// Unicode's White_Space property.
bool IsWhiteSpace(char32_t code_point);

}  // namespace moeserve

// Translates patterns of tokenizer files, which are written for Oniguruma (Ruby's syntax), to
// PCRE2. The two engines accept the same text and differ in its meaning: the version of Unicode,
// \s, \h, \v, $, x{2}+, set operations inside brackets. The translation uses only constructs on
// which PCRE2's meaning is known to be the same.
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

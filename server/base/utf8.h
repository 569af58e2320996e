// UTF-8 helpers for JSON answers.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve::server {

// Replaces every maximal ill-formed subsequence by U+FFFD, as the Unicode Standard recommends and
// Python's errors="replace" does.
std::string ReplaceInvalidUtf8(std::string_view bytes);

// Returns the number of code points of valid UTF-8.
size_t CountCodePoints(std::string_view text);

}  // namespace moeserve::server

// UTF-8 helpers for JSON responses.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve::server {

// Replaces every maximal ill-formed subsequence by U+FFFD, as the Unicode Standard recommends and
// Python's errors="replace" does.
std::string ReplaceInvalidUtf8(std::string_view bytes);

// Returns `text` if it has at most `max_bytes` bytes, else its beginning, which ends between two
// characters, and "...".
std::string Shortened(std::string_view text, size_t max_bytes);

// Returns the number of code points in `text`, which must be valid UTF-8.
size_t CountCodePoints(std::string_view text);

}  // namespace moeserve::server

// The little that JSON answers need of UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve::server {

// `bytes` with every maximal ill-formed part replaced by U+FFFD, as the Unicode Standard recommends
// and Python's errors="replace" does it.
std::string ReplaceInvalidUtf8(std::string_view bytes);

// Number of code points of valid UTF-8.
size_t CountCodePoints(std::string_view text);

}  // namespace moeserve::server

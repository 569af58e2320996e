// Grapheme clusters (Unicode Standard Annex 29, extended clusters), as Hugging Face's library finds
// them.
#pragma once

#include <cstddef>
#include <string_view>

namespace moeserve {

// Returns the end of the cluster that starts at byte `begin` of `text`, which must be valid UTF-8.
// `begin` must be less than the text's size and itself a cluster boundary. Control characters above
// U+FFFF are taken for others, which matters only to clusters of 6 bytes and more.
size_t GraphemeEnd(std::string_view text, size_t begin);

}  // namespace moeserve

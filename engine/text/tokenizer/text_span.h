// A part of a text.
#pragma once

#include <cstddef>

namespace moeserve {

// Bytes [begin, end) of a text.
struct TextSpan {
  size_t begin = 0;
  size_t end = 0;
  bool operator==(const TextSpan&) const = default;
};

}  // namespace moeserve

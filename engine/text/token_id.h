// The id of a token.
#pragma once

#include <cstdint>

namespace moeserve {

// An index into a model's vocabulary.
using TokenId = int32_t;

}  // namespace moeserve

// Why a token is run through the model.
#pragma once

#include <cstdint>

#include "kernels/route_counters.h"

namespace moeserve {

// kRecompute: the token was computed before, and a preemption freed its cache entry. Statistics
// count recomputed tokens separately, so that all other counts do not depend on the size of the
// cache.
enum class Phase : uint8_t {
  kPrefill = kTokenPrefill,
  kDecode = kTokenDecode,
  kRecompute = kTokenRecompute
};
inline constexpr int kNumPhases = 2;  // kPrefill and kDecode only

}  // namespace moeserve

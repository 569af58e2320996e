// Why a token is run through the model.
#pragma once

#include <cstdint>

#include "kernels/route_counters.h"

namespace moeserve {

// kRecompute: a token that was computed before and lost its cache entry to a preemption. Statistics
// count such work apart, so that the other counts do not depend on how much memory there is.
enum class Phase : uint8_t {
  kPrefill = kTokenPrefill,
  kDecode = kTokenDecode,
  kRecompute = kTokenRecompute
};
inline constexpr int kNumPhases = 2;  // kPrefill and kDecode

}  // namespace moeserve

// Why a token is run through the model.
#pragma once

#include <cstdint>

#include "kernels/route_counters.h"

namespace moeserve {

// kRecompute: the token was computed before, and a preemption freed its cache entry. kRejected: the
// token was drafted, and the model then drew another one. Statistics count these tokens separately,
// so that all other counts depend neither on the size of the cache nor on drafts.
enum class Phase : uint8_t {
  kPrefill = kTokenPrefill,
  kDecode = kTokenDecode,
  kRecompute = kTokenRecompute,
  kRejected = kTokenRejected
};
inline constexpr int kNumPhases = 2;  // kPrefill and kDecode only

constexpr bool IsCountedApart(Phase phase) { return IsCountedApart(static_cast<uint8_t>(phase)); }

}  // namespace moeserve

// How the rows of a sequence become one row.
#pragma once

#include <cstdint>

#include "base/kinds.h"
#include "kernels/base/host_device.h"

namespace moeserve {

enum class PoolKind : uint8_t { kMean, kMax };
constexpr NameTraits Traits(PoolKind k) { return NameIn({"mean", "max"}, k); }

// Returns the larger of the largest element so far and the next one, or NaN if one of them is NaN.
// Of equal elements the first one stays, so that zeros have the same sign on every device.
MOESERVE_HOST_DEVICE static inline float PoolMax(float largest, float next) {
  return next > largest || next != next ? next : largest;
}

}  // namespace moeserve

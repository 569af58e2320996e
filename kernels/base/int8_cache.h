// Rounding of keys and values to int8 for the KV cache. Every device stores the same integers and
// scales.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/host_device.h"
#include "kernels/base/int8_rows.h"

namespace moeserve {

// Returns how the key or value of a head is rounded whose largest MagnitudeBits() are `largest`.
// The scale is NaN if an element is not finite, so that every result computed from this head is NaN
// as well. RoundToInt8() rounds the elements.
MOESERVE_HOST_DEVICE static inline Int8Scale CacheScaleOf(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  // If all magnitudes are smaller, all elements become 0, because 127 / most could overflow.
  constexpr float kSmallest = 1e-36f;
  float most;
  const uint32_t bits = largest < kInfinity ? largest : kNan;
  std::memcpy(&most, &bits, sizeof(most));
  if (largest >= kInfinity) return {0.0f, most};
  if (most < kSmallest) return {0.0f, 0.0f};
  return {127.0f / most, most / 127.0f};
}

}  // namespace moeserve

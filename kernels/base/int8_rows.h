// Rounding of input rows to int8, for products with integer weights that have one scale per row.
// The integers and scales have the bits that the CPU's kernels compute (cpu/isa/quantize_row.inl).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/host_device.h"

namespace moeserve {

// How a row is rounded: its integers are value * inverse, rounded to the nearest one (ties to
// even), and each stands for that many times `scale`.
struct Int8Scale {
  float inverse;  // 0 if all integers of the row are 0
  float scale;    // NaN if a value of the row is not finite
};

// Returns the bits of the magnitude of `value`. Their order as integers is that of the magnitudes,
// and infinities and NaN come last. So the largest bits of a row, in whatever order they are
// compared, determine its scale.
MOESERVE_HOST_DEVICE static inline uint32_t MagnitudeBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffu;
}

// Returns how a row is rounded whose largest MagnitudeBits() are `largest`.
MOESERVE_HOST_DEVICE static inline Int8Scale Int8ScaleOf(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  float most;
  const uint32_t bits = largest < kInfinity ? largest : kNan;
  std::memcpy(&most, &bits, sizeof(most));
  // If all values are tiny, 127 / most could overflow; all integers are then 0.
  const bool zero = largest >= kInfinity || most < 1e-35f;
  return {zero ? 0.0f : 127.0f / most, most * (1.0f / 127.0f)};
}

// Returns the integer of one value of the row, in [-127, 127].
MOESERVE_HOST_DEVICE static inline int8_t RoundToInt8(float value, const Int8Scale& scale) {
  // Adding this number rounds to an integer, and leaves it in the lowest bits in two's complement.
  constexpr float kRound = 0x1.8p+23f;
  const float shifted = (scale.inverse == 0.0f ? 0.0f : value * scale.inverse) + kRound;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  return static_cast<int8_t>(bits & 0xffu);
}

// Rounds a row of n values, at most kWholeRow: stores its integers and returns its scale.
// `value_at(i)` returns value i.
template <typename ValueAt>
MOESERVE_HOST_DEVICE inline float RoundRowToInt8(int64_t n, const ValueAt& value_at, int8_t* out) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = MagnitudeBits(value_at(i));
    largest = bits > largest ? bits : largest;
  }
  const Int8Scale scale = Int8ScaleOf(largest);
  for (int64_t i = 0; i < n; ++i) out[i] = RoundToInt8(value_at(i), scale);
  return scale.scale;
}

}  // namespace moeserve

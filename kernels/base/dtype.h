// Element types of weights and activations, and scalar conversions between them.
// The conversions are static because the CPU kernels include this file in translation units for
// several instruction sets. If they were `inline` with external linkage, the linker could keep a
// copy that the processor cannot run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "kernels/base/host_device.h"

namespace moeserve {

enum class DType : uint8_t { kF32, kF16, kBF16 };

MOESERVE_HOST_DEVICE constexpr size_t SizeOf(DType t) { return t == DType::kF32 ? 4 : 2; }

constexpr std::string_view Name(DType t) {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "?";
}

// A bf16 value as its 16 bits: the upper half of the f32 with the same value.
using Bf16 = uint16_t;
// An IEEE binary16 value as its 16 bits.
using F16 = uint16_t;

MOESERVE_HOST_DEVICE static inline float F32FromBits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

MOESERVE_HOST_DEVICE static inline uint32_t BitsFromF32(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  return bits;
}

// Maps floats, infinities included, to integers in the same order; both zeros map to the same
// integer. Not defined for NaN.
MOESERVE_HOST_DEVICE static inline uint32_t OrderOfF32(float f) {
  const uint32_t bits = BitsFromF32(f + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
MOESERVE_HOST_DEVICE static inline float F32OfOrder(uint32_t order) {
  return F32FromBits((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

MOESERVE_HOST_DEVICE static inline float F32FromBf16(Bf16 v) {
  return F32FromBits(static_cast<uint32_t>(v) << 16);
}

// Rounds to nearest, ties to even; NaN stays a (quiet) NaN.
MOESERVE_HOST_DEVICE static inline Bf16 Bf16FromF32(float f) {
  const uint32_t bits = BitsFromF32(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bf16>((bits >> 16) | 0x40u);
  return static_cast<Bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

MOESERVE_HOST_DEVICE static inline float F32FromF16(F16 v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16;
  const uint32_t exponent = (v >> 10) & 0x1fu;
  const uint32_t mantissa = v & 0x3ffu;
  if (exponent == 0x1f) return F32FromBits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return F32FromBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // A subnormal is mantissa * 2^-24, exact in f32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return F32FromBits(BitsFromF32(magnitude) | sign);
}

// Rounds to nearest, ties to even; values that are too large become infinite, NaN stays a (quiet)
// NaN.
MOESERVE_HOST_DEVICE static inline F16 F16FromF32(float f) {
  const uint32_t bits = BitsFromF32(f);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<F16>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<F16>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Below the smallest normal: f32 values near 0.5 have a step of 2^-24, the step of f16
    // subnormals, so adding 0.5 rounds to that step.
    const uint32_t rounded = BitsFromF32(F32FromBits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<F16>(sign | rounded);
  }
  return static_cast<F16>(sign |
                          ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

}  // namespace moeserve

// The exponential function and the logarithm for routing: their results have the same bits on every
// backend and instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/host_device.h"

namespace moeserve {

// Returns e^x within 2 ulp. Uses only fused multiply-adds and operations on exponent bits, so that
// every compiler and device computes the same bits. Returns 0 below ln 2^-126, +Inf above the
// logarithm of the largest float, and NaN for NaN.
MOESERVE_HOST_DEVICE static inline float ContractExp(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e400p-1f;  // has 14 significant bits, so n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p+23f;  // adding and then subtracting it rounds to the nearest
                                        // integer
  constexpr float kSmallest = -0x1.5d589ep+6f;  // ln 2^-126
  constexpr float kLargest = 0x1.62e42ep+6f;    // ln of the largest float
  const bool too_small = x < kSmallest;
  const bool too_large = x > kLargest;
  // Arguments out of range are replaced by 0, so that no operation overflows.
  const float v = (too_small || too_large) ? 0.0f : x;
  const float n = __builtin_fmaf(v, kLog2E, kRound) - kRound;
  float r = __builtin_fmaf(-n, kLn2High, v);
  r = __builtin_fmaf(-n, kLn2Low, r);
  float p = 0x1.a01a02p-13f;  // 1/7!
  p = __builtin_fmaf(p, r, 0x1.6c16c2p-10f);
  p = __builtin_fmaf(p, r, 0x1.111112p-7f);
  p = __builtin_fmaf(p, r, 0x1.555556p-5f);
  p = __builtin_fmaf(p, r, 0x1.555556p-3f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  // 2^n is applied as two factors: n can be 128, which exceeds the largest exponent of a float.
  const int32_t in = static_cast<int32_t>(v == v ? n : 0.0f);
  const int32_t half = in >> 1;
  const int32_t bits1 = (half + 127) << 23;
  const int32_t bits2 = (in - half + 127) << 23;
  float scale1, scale2;
  std::memcpy(&scale1, &bits1, sizeof(scale1));
  std::memcpy(&scale2, &bits2, sizeof(scale2));
  const float y = p * scale1 * scale2;
  return too_small ? 0.0f : (too_large ? __builtin_inff() : y);
}

// Returns log(1 + x) within 2 ulp, for x in [0, 1]; NaN for NaN. Uses only additions,
// multiplications, fused multiply-adds and one division, which round alike everywhere.
MOESERVE_HOST_DEVICE static inline float ContractLog1p(float x) {
  // log(1 + x) = 2 artanh(x / (2 + x)) is a series in the odd powers of u = 2 x / (2 + x), at most
  // 2/3: the sum of u^(2 i + 1) / ((2 i + 1) 4^i). The first term left out is below 2^-29 of it.
  const float u = (x + x) / (2.0f + x);
  const float z = u * u;
  float p = 0x1.111112p-18f;  // 1 / (15 * 4^7)
  p = __builtin_fmaf(p, z, 0x1.3b13b2p-16f);
  p = __builtin_fmaf(p, z, 0x1.745d18p-14f);
  p = __builtin_fmaf(p, z, 0x1.c71c72p-12f);
  p = __builtin_fmaf(p, z, 0x1.24924ap-9f);
  p = __builtin_fmaf(p, z, 0x1.99999ap-7f);
  p = __builtin_fmaf(p, z, 0x1.555556p-4f);
  return __builtin_fmaf(u * z, p, u);
}

}  // namespace moeserve

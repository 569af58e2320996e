// Activation functions, with the same formulas as on the CPU.
//
// If a result is rounded to bf16 next, exponentials and quotients are computed by the special
// function units: their error is a few f32 ulps larger, and they take a fraction of the
// instructions.
#pragma once

#include "kernels/backend.h"
#include "kernels/base/exp.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Returns 2^x with an error of 2 f32 ulps; results below the smallest normal number are 0.
__device__ inline float FastExp2(float x) {
#if defined(MOESERVE_CUDA_EMULATION)
  const float power = exp2f(x);
  return power < 0x1p-126f ? 0.0f : power;
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}

// Returns 1 / x for x of at least 1; results below the smallest normal number are 0.
__device__ inline float FastInverse(float x) {
#if defined(MOESERVE_CUDA_EMULATION)
  return 1.0f / x;
#else
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#endif
}

// Returns 1 / (1 + e^-x).
template <bool kFast>
__device__ inline float Sigmoid(float x) {
#if !defined(MOESERVE_CUDA_EMULATION)
  if constexpr (kFast) return FastInverse(1.0f + FastExp2(x * -1.4426950408889634f));
#endif
  return 1.0f / (1.0f + ContractExp(-x));
}

// Returns the lower or the higher of x and a bound that is not NaN, and NaN for NaN. The fast forms
// are one instruction; they do not keep the bits of a NaN.
template <bool kFast>
__device__ inline float AtMost(float x, float bound) {
#if !defined(MOESERVE_CUDA_EMULATION)
  if constexpr (kFast) {
    float lower;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(lower) : "f"(x), "f"(bound));
    return lower;
  }
#endif
  return x > bound ? bound : x;
}
template <bool kFast>
__device__ inline float AtLeast(float x, float bound) {
#if !defined(MOESERVE_CUDA_EMULATION)
  if constexpr (kFast) {
    float higher;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(higher) : "f"(x), "f"(bound));
    return higher;
  }
#endif
  return x < bound ? bound : x;
}

// Returns x Phi(x) = max(x, 0) - |x| Phi(-|x|), where Phi is the normal distribution function and
// log2 Phi(-t) is a polynomial of degree 8. In contrast to 1 + erf, the difference loses no digits,
// so the error is relative to the result: below 7e-6 for x > -5.6, which changes one in 3,000
// results that are rounded to bf16, next to a tie. For smaller x, whose results are below 6e-8, the
// error grows, to 1e-4 at -7 and 3e-2 at -12.
__device__ inline float FastGelu(float x) {
  const float t = fminf(fabsf(x), 13.5f);  // Phi(-13.5) is below the smallest normal number
  float log2_phi = 0x1.159d40p-24f;
  log2_phi = __fmaf_rn(log2_phi, t, -0x1.c56ba6p-19f);
  log2_phi = __fmaf_rn(log2_phi, t, 0x1.409a1cp-14f);
  log2_phi = __fmaf_rn(log2_phi, t, -0x1.073280p-10f);
  log2_phi = __fmaf_rn(log2_phi, t, 0x1.1d4e82p-7f);
  log2_phi = __fmaf_rn(log2_phi, t, -0x1.bc65cep-5f);
  log2_phi = __fmaf_rn(log2_phi, t, -0x1.d54346p-2f);
  log2_phi = __fmaf_rn(log2_phi, t, -0x1.26bbc4p+0f);
  log2_phi = __fmaf_rn(log2_phi, t, -0x1.ffff1cp-1f);
  // Not -t: an infinity times 0 is NaN, so that a numeric error is detected.
  return __fmaf_rn(-fabsf(x), FastExp2(log2_phi), AtLeast<true>(x, 0.0f));
}

// Returns x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ inline float FastGeluTanh(float x) {
  constexpr float kLinear = -2.302208198f;  // -2 sqrt(2 / pi) log2 e
  constexpr float kCubic = -0.1029432396f;  // 0.044715 times that
  const float power = FastExp2(x * __fmaf_rn(x * x, kCubic, kLinear));
  return x * FastInverse(1.0f + power);
}

// `kFast` must be set only if the result is rounded to bf16 next.
template <ActivationKind kKind, bool kFast>
__device__ inline float Activated(float x) {
  if constexpr (kKind == ActivationKind::kSilu) {
    return x * Sigmoid<kFast>(x);
  } else if constexpr (kKind == ActivationKind::kGelu) {
    if constexpr (kFast) return FastGelu(x);
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    if constexpr (kFast) return FastGeluTanh(x);
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    const float u = kSqrt2OverPi * (x + 0.044715f * x * x * x);
    // 1 + tanh u = 2 sigmoid(2 u).
    return x * Sigmoid<false>(2.0f * u);
  } else if constexpr (kKind == ActivationKind::kRelu) {
    // A NaN input yields NaN, so that a numeric error is detected in the request that caused it.
    return AtLeast<kFast>(x, 0.0f);
  } else if constexpr (kKind == ActivationKind::kTanh) {
    return tanhf(x);
  } else if constexpr (kKind == ActivationKind::kRelu2) {
    return x < 0.0f ? 0.0f : x * x;
  } else {
    return x;
  }
}

template <ActivationKind kKind, int kCount>
__device__ inline void ActivateEach(bool fast, float (&x)[kCount]) {
  if (fast) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = Activated<kKind, true>(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = Activated<kKind, false>(x[i]);
  }
}

// Applies the activation to several values at once, which takes one branch and gives independent
// chains of instructions. `fast` must be set only if the results are rounded to bf16 next.
template <int kCount>
__device__ inline void Activate(ActivationKind kind, bool fast, float (&x)[kCount]) {
  switch (kind) {
    case ActivationKind::kNone:
      return;
    case ActivationKind::kSilu:
      return ActivateEach<ActivationKind::kSilu>(fast, x);
    case ActivationKind::kGelu:
      return ActivateEach<ActivationKind::kGelu>(fast, x);
    case ActivationKind::kGeluTanh:
      return ActivateEach<ActivationKind::kGeluTanh>(fast, x);
    case ActivationKind::kRelu:
      return ActivateEach<ActivationKind::kRelu>(fast, x);
    case ActivationKind::kTanh:
      return ActivateEach<ActivationKind::kTanh>(false, x);
    case ActivationKind::kRelu2:
      return ActivateEach<ActivationKind::kRelu2>(false, x);
  }
}

// The bounds of a gated layer's activation; infinite where there is none.
struct GateBounds {
  float gate;    // of the gate before the activation
  float up;      // of the magnitude of the up half
  float result;  // of the gate after the activation
};

__device__ inline GateBounds GateBoundsOf(const Activation& a) {
  const float none = __int_as_float(0x7f800000);
  const float limit = a.limit > 0.0f ? a.limit : none;
  return {a.limit_after ? none : limit, limit, a.limit_after ? limit : none};
}

// Returns the hidden unit of a gated layer with SiLU and any bounds, slope and offset.
template <bool kFast>
__device__ inline float BoundedSwiglu(const Activation& a, const GateBounds& bounds, float gate,
                                      float up) {
  gate = AtMost<kFast>(gate, bounds.gate);
  up = AtLeast<kFast>(AtMost<kFast>(up, bounds.up), -bounds.up) + a.up_offset;
  return AtMost<kFast>(gate * Sigmoid<kFast>(a.slope * gate), bounds.result) * up;
}

// Returns whether BoundedSwiglu() computes the hidden units, instead of the product of a plain
// activation and the up half.
MOESERVE_HOST_DEVICE inline bool IsBoundedSwiglu(const Activation& a) {
  return !IsPlain(a) && (a.kind == ActivationKind::kSilu || a.slope != 1.0f);
}

// Computes the hidden units of a gated layer (kernels/base/activation.h) from its outputs, and
// stores them in `gate`. Overwrites `up`.
template <int kCount>
__device__ inline void ActivateGated(const Activation& a, bool fast, float (&gate)[kCount],
                                     float (&up)[kCount]) {
  if (IsBoundedSwiglu(a)) {
    const GateBounds bounds = GateBoundsOf(a);
    if (fast) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gate[i] = BoundedSwiglu<true>(a, bounds, gate[i], up[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gate[i] = BoundedSwiglu<false>(a, bounds, gate[i], up[i]);
    }
    return;
  }
  if (!IsPlain(a)) {
    const GateBounds bounds = GateBoundsOf(a);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gate[i] = AtMost<false>(gate[i], bounds.gate);
      up[i] = AtLeast<false>(AtMost<false>(up[i], bounds.up), -bounds.up) + a.up_offset;
    }
  }
  Activate(a.kind, fast, gate);
  if (a.limit_after && a.limit > 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) gate[i] = AtMost<false>(gate[i], a.limit);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) gate[i] *= up[i];
}

}  // namespace moeserve::cuda

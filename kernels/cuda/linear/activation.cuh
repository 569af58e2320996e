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

// Returns 1 / (1 + e^-x).
template <bool kFast>
__device__ inline float Sigmoid(float x) {
#if !defined(MOESERVE_CUDA_EMULATION)
  if constexpr (kFast) {
    float power, inverse;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
  }
#endif
  return 1.0f / (1.0f + ContractExp(-x));
}

template <ActivationKind kKind, bool kFast>
__device__ inline float Activated(float x) {
  if constexpr (kKind == ActivationKind::kSilu) {
    return x * Sigmoid<kFast>(x);
  } else if constexpr (kKind == ActivationKind::kGelu) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    const float u = kSqrt2OverPi * (x + 0.044715f * x * x * x);
    // 1 + tanh u = 2 sigmoid(2 u).
    return x * Sigmoid<kFast>(2.0f * u);
  } else if constexpr (kKind == ActivationKind::kRelu) {
    // A NaN input yields NaN, so that a numeric error is detected in the request that caused it.
    return x < 0.0f ? 0.0f : x;
  } else if constexpr (kKind == ActivationKind::kTanh) {
    return tanhf(x);
  } else if constexpr (kKind == ActivationKind::kRelu2) {
    return x < 0.0f ? 0.0f : x * x;
  } else {
    return x;
  }
}

template <ActivationKind kKind, bool kFast, int kCount>
__device__ inline void ActivateEach(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = Activated<kKind, kFast>(x[i]);
}

// Applies the activation to several values at once, which takes one branch and gives independent
// chains of instructions. `fast` must be set only if the results are rounded to bf16 next.
template <int kCount>
__device__ inline void Activate(ActivationKind kind, bool fast, float (&x)[kCount]) {
  switch (kind) {
    case ActivationKind::kNone:
      return;
    case ActivationKind::kSilu:
      return fast ? ActivateEach<ActivationKind::kSilu, true>(x)
                  : ActivateEach<ActivationKind::kSilu, false>(x);
    case ActivationKind::kGelu:
      return ActivateEach<ActivationKind::kGelu, false>(x);
    case ActivationKind::kGeluTanh:
      return fast ? ActivateEach<ActivationKind::kGeluTanh, true>(x)
                  : ActivateEach<ActivationKind::kGeluTanh, false>(x);
    case ActivationKind::kRelu:
      return ActivateEach<ActivationKind::kRelu, false>(x);
    case ActivationKind::kTanh:
      return ActivateEach<ActivationKind::kTanh, false>(x);
    case ActivationKind::kRelu2:
      return ActivateEach<ActivationKind::kRelu2, false>(x);
  }
}

// Computes the hidden units of a gated layer (kernels/base/activation.h) from its outputs, and
// stores them in `gate`. Overwrites `up`.
template <int kCount>
__device__ inline void ActivateGated(const Activation& a, bool fast, float (&gate)[kCount],
                                     float (&up)[kCount]) {
  if (!IsPlain(a)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Comparisons with NaN are false, so NaN stays.
      if (a.limit > 0.0f) {
        if (!a.limit_after) gate[i] = gate[i] > a.limit ? a.limit : gate[i];
        up[i] = up[i] > a.limit ? a.limit : up[i];
        up[i] = up[i] < -a.limit ? -a.limit : up[i];
      }
      up[i] += a.up_offset;
    }
  }
  if (a.slope == 1.0f) {
    Activate(a.kind, fast, gate);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) gate[i] *= Sigmoid<false>(a.slope * gate[i]);
  }
  if (a.limit_after && a.limit > 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) gate[i] = gate[i] > a.limit ? a.limit : gate[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) gate[i] *= up[i];
}

}  // namespace moeserve::cuda

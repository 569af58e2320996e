// Activation functions, the same formulas as on the CPU.
//
// Values that are rounded to bf16 next take exponentials and quotients from the special function
// units: a few units in the last place of f32 less exact, and a fraction of the instructions.
#pragma once

#include "kernels/backend.h"
#include "kernels/base/exp.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// 1 / (1 + e^-x).
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
    // NaN stays NaN: a numeric failure must reach its request.
    return x < 0.0f ? 0.0f : x;
  } else {
    return x;
  }
}

template <ActivationKind kKind, bool kFast, int kCount>
__device__ inline void ActivateEach(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = Activated<kKind, kFast>(x[i]);
}

// Several values at once: one branch, and independent chains of instructions. `fast`: the results
// are rounded to bf16 next.
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
  }
}

}  // namespace moeserve::cuda

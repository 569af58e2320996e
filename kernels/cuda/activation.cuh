// Activation functions, the same formulas as on the CPU.
#pragma once

#include "kernels/backend.h"
#include "kernels/base/exp.h"
#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

template <ActivationKind kKind>
__device__ inline float Activated(float x) {
  if constexpr (kKind == ActivationKind::kSilu) {
    return x * (1.0f / (1.0f + ContractExp(-x)));
  } else if constexpr (kKind == ActivationKind::kGelu) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    const float u = kSqrt2OverPi * (x + 0.044715f * x * x * x);
    return 0.5f * x * (2.0f - 2.0f / (1.0f + ContractExp(2.0f * u)));
  } else if constexpr (kKind == ActivationKind::kRelu) {
    // NaN stays NaN: a numeric failure must reach its request.
    return x < 0.0f ? 0.0f : x;
  } else {
    return x;
  }
}

template <ActivationKind kKind, int kCount>
__device__ inline void ActivateEach(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = Activated<kKind>(x[i]);
}

// Several values at once: one branch, and chains of instructions that overlap.
template <int kCount>
__device__ inline void Activate(ActivationKind kind, float (&x)[kCount]) {
  switch (kind) {
    case ActivationKind::kNone:
      return;
    case ActivationKind::kSilu:
      return ActivateEach<ActivationKind::kSilu>(x);
    case ActivationKind::kGelu:
      return ActivateEach<ActivationKind::kGelu>(x);
    case ActivationKind::kGeluTanh:
      return ActivateEach<ActivationKind::kGeluTanh>(x);
    case ActivationKind::kRelu:
      return ActivateEach<ActivationKind::kRelu>(x);
  }
}

}  // namespace moeserve::cuda

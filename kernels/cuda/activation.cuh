// Activation functions, the same formulas as on the CPU.
#pragma once

#include "kernels/backend.h"
#include "kernels/base/exp.h"
#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

__device__ inline float Activate(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::kNone:
      return x;
    case ActivationKind::kSilu:
      return x * (1.0f / (1.0f + ContractExp(-x)));
    case ActivationKind::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    case ActivationKind::kGeluTanh: {
      constexpr float kSqrt2OverPi = 0.7978845608028654f;
      const float u = kSqrt2OverPi * (x + 0.044715f * x * x * x);
      return 0.5f * x * (2.0f - 2.0f / (1.0f + ContractExp(2.0f * u)));
    }
    case ActivationKind::kRelu:
      // NaN stays NaN: a numeric failure must reach its request.
      return x < 0.0f ? 0.0f : x;
  }
  return x;
}

}  // namespace moeserve::cuda

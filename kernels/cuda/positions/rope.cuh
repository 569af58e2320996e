// The rotation of one pair of dimensions.
#pragma once

#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Rotates (x, y) by the angle with this (cosine, sine).
__device__ __forceinline__ void Turn(float& x, float& y, float2 angle) {
  const float u = x, v = y;
  x = u * angle.x - v * angle.y;
  y = v * angle.x + u * angle.y;
}

}  // namespace moeserve::cuda

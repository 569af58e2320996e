// Soft cap of attention scores and logits, as in Gemma 2.
#pragma once

#include "kernels/base/exp.h"
#include "kernels/base/host_device.h"

namespace moeserve {

// Returns cap * tanh(x / cap), whose magnitude is at most `cap`, with an error of at most about
// 2^-22 * cap. `cap` is above 0. Returns NaN for NaN.
MOESERVE_HOST_DEVICE static inline float SoftCap(float x, float cap) {
  const float e = ContractExp(-2.0f * __builtin_fabsf(x / cap));
  return __builtin_copysignf(cap * ((1.0f - e) / (1.0f + e)), x);
}

}  // namespace moeserve

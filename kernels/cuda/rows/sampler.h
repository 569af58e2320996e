// Tokens drawn from logits on the device, the same ones that the engine's sampler draws on the
// host (engine/sample/sampler.h, kernels/base/sampling.h).
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

struct SampleLaunch {
  const SampleRow* rows = nullptr;  // [count], device
  SampleResult* results = nullptr;  // [count], device; results[i] of rows[i]
  int count = 0;                    // the grid's size
  const float* logits = nullptr;    // [R, stride], device
  int64_t stride = 0;               // elements from row to row, at least `vocabulary`
  int vocabulary = 0;               // 1 to 2^23
};
// Asynchronous on `stream`. A result depends on its own row alone.
void LaunchSample(const SampleLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda

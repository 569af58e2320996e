// Draws tokens from logits on the device. The result equals that of the engine's sampler on the
// host (engine/sample/sampler.h); both use kernels/base/sampling.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

struct SampleLaunch {
  const SampleRow* rows = nullptr;  // [count], device memory
  SampleResult* results = nullptr;  // [count], device memory; results[i] belongs to rows[i]
  int count = 0;                    // number of rows
  const float* logits = nullptr;    // [rows of logits, stride], device memory
  int64_t stride = 0;               // elements from one row to the next, at least `vocabulary`
  int vocabulary = 0;               // 1 to 2^23
  // Blocks per row: 1, or the size of a cluster in SampleBlockCounts(); 0: ChooseSampleBlocks().
  int blocks = 0;
};
// Returns the numbers of blocks per row with which the current device can sample, in ascending
// order. All give the same results.
std::vector<int> SampleBlockCounts(int vocabulary);
// Returns one of them, by an estimate of which is the fastest.
int ChooseSampleBlocks(int rows, int vocabulary);
// Asynchronous on `stream`. Each result depends on its own row alone.
void LaunchSample(const SampleLaunch& args, cudaStream_t stream);

}  // namespace moeserve::cuda

// Measures the read bandwidth of device memory.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Returns bytes per second, the best of `rounds` passes over `bytes` of memory. ResourceExhausted
// if the memory cannot be allocated.
Result<double> MeasureReadBandwidth(int64_t bytes, int rounds, cudaStream_t stream);

}  // namespace moeserve::cuda

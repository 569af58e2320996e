// Measures the bandwidth of reads from device memory.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Bytes per second, the best of `rounds` passes over `bytes` of memory. ResourceExhausted.
Result<double> MeasureReadBandwidth(int64_t bytes, int rounds, cudaStream_t stream);

}  // namespace moeserve::cuda

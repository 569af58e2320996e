// The functions that the registry calls to find and open a CUDA device.
#pragma once

#include <memory>

#include "base/status.h"
#include "kernels/backend.h"
#include "kernels/backend_options.h"

namespace moeserve::cuda {

// Returns OK if there is at least one usable device, else Unavailable. The message states the
// cause: the build has no CUDA support, there is no driver, or the error of the CUDA runtime.
absl::Status CheckDevice();

// Returns the backend of the first device. Unavailable if CheckDevice() fails or the device is
// older than compute capability 8.0; ResourceExhausted if memory runs out.
Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions& options);

// A StreamQuery of this device.
Result<bool> StreamIsIdle(void* stream);

}  // namespace moeserve::cuda

// CUDA devices, as the registry sees them.
#pragma once

#include <memory>

#include "base/status.h"
#include "kernels/backend.h"
#include "kernels/registry.h"

namespace moeserve::cuda {

// OK if at least one device answers; else Unavailable with the cause: built without CUDA, no
// driver, or the runtime's message.
absl::Status CheckDevice();

// The backend of the first device. Unavailable where CheckDevice() is, or where the device is too
// old; ResourceExhausted.
Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions& options);

}  // namespace moeserve::cuda

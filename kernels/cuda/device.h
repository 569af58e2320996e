// Whether a CUDA device can be used.
#pragma once

#include "kernels/base/status.h"

namespace moeserve::cuda {

// OK if at least one device answers; else Unavailable with the cause: built without CUDA, no
// driver, or what the runtime says.
absl::Status CheckDevice();

}  // namespace moeserve::cuda

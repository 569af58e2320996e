// Identifies what the choices of kernels depend on.
#pragma once

#include <string>

#include "base/status.h"

namespace moeserve::cuda {

// Returns one line that names this build of the program, the current device and its driver. Choices
// of kernels are only used with the key with which they were measured.
Result<std::string> TuningKey();

}  // namespace moeserve::cuda

// This file is linked if no CUDA compiler was found.

#include "kernels/cuda/device/device.h"

namespace moeserve::cuda {

absl::Status CheckDevice() {
  return absl::UnavailableError(
      "device cuda: this build has no CUDA support (no nvcc was found when it was configured)");
}

Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions&) { return CheckDevice(); }

}  // namespace moeserve::cuda

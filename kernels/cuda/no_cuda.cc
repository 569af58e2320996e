// This file is linked if the CUDA backend was left out or no CUDA compiler was found.

#include "kernels/cuda/device/device.h"

namespace moeserve::cuda {

absl::Status CheckDevice() {
#ifdef MOESERVE_CUDA_LEFT_OUT
  return absl::UnavailableError(
      "device cuda: this build has no CUDA support (it was configured with MOESERVE_CUDA=OFF, as "
      "deploy/quickstart.sh does without --cuda where it finds no GPU)");
#else
  return absl::UnavailableError(
      "device cuda: this build has no CUDA support (no nvcc was found when it was configured)");
#endif
}

Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions&) { return CheckDevice(); }

Result<bool> StreamIsIdle(void*) { return CheckDevice(); }

}  // namespace moeserve::cuda

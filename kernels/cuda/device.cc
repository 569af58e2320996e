#include "kernels/cuda/device.h"

#include <string>

#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

absl::Status CheckDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return absl::UnavailableError(std::string("device cuda: no device can be used: ") +
                                  cudaGetErrorString(error));
  }
  if (count == 0) return absl::UnavailableError("device cuda: the driver reports no device");
  return absl::OkStatus();
}

}  // namespace moeserve::cuda

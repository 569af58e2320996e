#include "kernels/cuda/device/device.h"

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

absl::Status CheckDevice() {
  // Makes the first CUDA call load all kernels. If kernels were loaded later, there might be no
  // memory left for them, or a stream might be capturing. The driver reads this variable once; a
  // value set by the user is kept.
  static const int set = setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  MOESERVE_CHECK(set == 0, "the environment can be extended");
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return absl::UnavailableError(std::string("device cuda: no device can be used: ") +
                                  cudaGetErrorString(error));
  }
  if (count == 0) return absl::UnavailableError("device cuda: the driver reports no device");
  return absl::OkStatus();
}

Result<bool> StreamIsIdle(void* stream) {
  const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return true;
  if (error != cudaErrorNotReady) return absl::InternalError(cudaGetErrorString(error));
  // It is no error, but the runtime may keep it as one.
  if (cudaPeekAtLastError() == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
  return false;
}

}  // namespace moeserve::cuda

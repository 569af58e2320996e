// Launches of kernels.
#pragma once

#include <utility>

#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic shared memory of a block, up to the device's opt-in limit
  cudaStream_t stream = nullptr;
  // The kernel may start before its predecessor in the stream has ended; it reads results of other
  // kernels only after GridDependencyWait() (ptx.cuh). Ignored where that is not compiled in.
  bool overlaps_predecessor = false;
};

// Dynamic shared memory, in bytes, that a block on the current device may ask for: 163 KiB on 8.0
// and 8.7, 227 KiB on 9.0, 99 KiB on 8.6, 8.9 and 12.0.
size_t SharedMemoryLimit();

namespace internal {
// Raises the limit of `kernel`'s dynamic shared memory on the current device if it is lower, and
// requests the split of the first-level cache that lets the most blocks run at a time.
void AllowSharedMemory(const void* kernel, size_t bytes);
// Whether the code for the current device has GridDependencyWait() and the environment variable
// MOESERVE_CUDA_OVERLAP is not 0. Setting it to 0 measures the effect of overlapping.
bool HasGridDependencies();
// Stops the process with CUDA's message for `error`.
[[noreturn]] void LaunchFailed(cudaError_t error, const LaunchShape& shape);
inline constexpr size_t kLittleSharedMemory = 16 << 10;
}  // namespace internal

// Enqueues `kernel`; a grid without blocks enqueues nothing. A launch that the runtime refuses is a
// broken invariant. Callable while the stream captures, from any thread.
template <typename... Parameters, typename... Arguments>
void Launch(void (*kernel)(Parameters...), const LaunchShape& shape, Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  if (shape.shared_bytes > internal::kLittleSharedMemory) {
    internal::AllowSharedMemory(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cudaLaunchAttribute attribute{};
  if (shape.overlaps_predecessor && internal::HasGridDependencies()) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) internal::LaunchFailed(error, shape);
}

}  // namespace moeserve::cuda

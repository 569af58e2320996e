// Launches kernels.
#pragma once

#include <utility>

#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic shared memory per block, up to the device's opt-in limit
  cudaStream_t stream = nullptr;
  // Allows the kernel to start before its predecessor in the stream has ended. The kernel must call
  // GridDependencyWait() (ptx.cuh) before it reads results of other kernels. Ignored if the code
  // for the device does not contain GridDependencyWait().
  bool overlaps_predecessor = false;
  // Blocks per cluster, up to 8 in all, or 16 where MaxActiveClusters() is not 0. They divide the
  // grid. More than one needs HasClusters().
  dim3 cluster = dim3(1);
};

// Returns the dynamic shared memory, in bytes, that a block on the current device may request: 163
// KiB for compute capabilities 8.0 and 8.7, 227 KiB for 9.0, 99 KiB for 8.6, 8.9 and 12.0.
size_t SharedMemoryLimit();
// Returns an attribute of the current device.
int DeviceAttribute(cudaDeviceAttr attribute);
// Returns whether the code for the current device contains the instructions of clusters
// (cluster.cuh).
bool HasClusters();

namespace internal {
// Raises the limit on `kernel`'s dynamic shared memory on the current device to at least `bytes`,
// and requests the largest share of the first-level cache as shared memory, so that as many blocks
// as possible run at a time.
void AllowSharedMemory(const void* kernel, size_t bytes);
// Allows `kernel` clusters of more than the 8 blocks that every device with clusters can run.
void AllowLargeClusters(const void* kernel);
int MaxActiveClusters(const void* kernel, const LaunchShape& shape);
cudaLaunchAttribute ClusterAttribute(const LaunchShape& shape);
// Returns whether the code for the current device contains GridDependencyWait() and the environment
// variable MOESERVE_CUDA_OVERLAP is not 0. Setting the variable to 0 allows measuring the effect of
// overlapping kernels.
bool HasGridDependencies();
// Stops the process and prints CUDA's message for `error`.
[[noreturn]] void LaunchFailed(cudaError_t error, const LaunchShape& shape);
inline constexpr size_t kLittleSharedMemory = 16 << 10;
inline constexpr unsigned kPortableClusterBlocks = 8;

template <typename... Parameters>
void AllowShape(void (*kernel)(Parameters...), const LaunchShape& shape) {
  const void* pointer = reinterpret_cast<const void*>(kernel);
  if (shape.shared_bytes > kLittleSharedMemory) AllowSharedMemory(pointer, shape.shared_bytes);
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > kPortableClusterBlocks) {
    AllowLargeClusters(pointer);
  }
}
}  // namespace internal

// Returns how many clusters of this shape the current device can run at a time; 0 if none.
template <typename... Parameters>
int MaxActiveClusters(void (*kernel)(Parameters...), const LaunchShape& shape) {
  if (!HasClusters()) return 0;
  internal::AllowShape(kernel, shape);
  return internal::MaxActiveClusters(reinterpret_cast<const void*>(kernel), shape);
}

// Enqueues `kernel`; an empty grid enqueues nothing. An error of the launch is a broken invariant
// and stops the process. May be called from any thread, also while the stream captures.
template <typename... Parameters, typename... Arguments>
void Launch(void (*kernel)(Parameters...), const LaunchShape& shape, Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  internal::AllowShape(kernel, shape);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (shape.overlaps_predecessor && internal::HasGridDependencies()) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[config.numAttrs++] = internal::ClusterAttribute(shape);
  }
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) internal::LaunchFailed(error, shape);
}

}  // namespace moeserve::cuda

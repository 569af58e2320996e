#include "kernels/cuda/device/launch.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"

namespace moeserve::cuda {

int DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MOESERVE_CHECK(cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess,
                 "attributes of the CUDA device");
  return value;
}

size_t SharedMemoryLimit() {
  return static_cast<size_t>(DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

bool HasClusters() {
  // Only code compiled for 9.0a contains the instructions (see HasGridDependencies()).
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor) == 9;
}

namespace internal {

void AllowSharedMemory(const void* kernel, size_t bytes) {
  static Mutex mutex;
  static auto* const allowed ABSL_PT_GUARDED_BY(mutex) =
      new std::map<std::pair<const void*, int>, size_t>;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  size_t& limit = (*allowed)[{kernel, device}];
  if (bytes <= limit) return;
  for (const auto& [attribute, value] :
       {std::pair{cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)},
        std::pair{cudaFuncAttributePreferredSharedMemoryCarveout,
                  static_cast<int>(cudaSharedmemCarveoutMaxShared)}}) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, value);
    MOESERVE_CHECK(error == cudaSuccess, cudaGetErrorString(error));
  }
  limit = bytes;
}

void AllowLargeClusters(const void* kernel) {
  static Mutex mutex;
  static auto* const allowed ABSL_PT_GUARDED_BY(mutex) = new std::set<std::pair<const void*, int>>;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  if (!allowed->insert({kernel, device}).second) return;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  MOESERVE_CHECK(error == cudaSuccess, cudaGetErrorString(error));
}

cudaLaunchAttribute ClusterAttribute(const LaunchShape& shape) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = shape.cluster.x;
  attribute.val.clusterDim.y = shape.cluster.y;
  attribute.val.clusterDim.z = shape.cluster.z;
  return attribute;
}

int MaxActiveClusters(const void* kernel, const LaunchShape& shape) {
  cudaLaunchAttribute attribute = ClusterAttribute(shape);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // clears the error
    return 0;
  }
  return clusters;
}

bool HasGridDependencies() {
  // Only code compiled for 9.0a contains GridDependencyWait(). That code runs only on devices of
  // capability 9.0; later devices run the code for 8.0.
  static const bool has = [] {
    const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
    const char* wanted = std::getenv("MOESERVE_CUDA_OVERLAP");
    return major == 9 && (wanted == nullptr || std::string_view(wanted) != "0");
  }();
  return has;
}

void LaunchFailed(cudaError_t error, const LaunchShape& shape) {
  std::fprintf(stderr,
               "CUDA launch of grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory: %s\n",
               shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x, shape.block.y,
               shape.block.z, shape.shared_bytes, cudaGetErrorString(error));
  MOESERVE_CHECK(false, "a kernel could not be launched");
  std::abort();
}

}  // namespace internal
}  // namespace moeserve::cuda

// Implements the devices, memory and copies of the emulated CUDA runtime.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/cuda_emulator/launch_count.h"
#include "tests/cuda_emulator/runtime_state.h"
#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator::names {
namespace {

constexpr size_t kDeviceBytes = size_t{80} << 30;
constexpr int kSharedDefault = 48 << 10;
constexpr int kSharedOptin = 227 << 10;
constexpr int kSharedPerMultiprocessor = 228 << 10;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kMaxGridYz = 65535;
constexpr int kPortableClusterBlocks = 8;
constexpr size_t kAlignment = 256;

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<uint64_t> kernels_run = 0;

using Allocations = std::map<const char*, size_t>;

enum class Where : uint8_t { kNowhere, kInside, kOverrun };

Where Find(const Allocations& all, const void* pointer, size_t bytes) {
  const char* p = static_cast<const char*>(pointer);
  auto it = all.upper_bound(p);
  if (it == all.begin()) return Where::kNowhere;
  --it;
  if (p >= it->first + it->second) return Where::kNowhere;
  return p + bytes <= it->first + it->second ? Where::kInside : Where::kOverrun;
}

cudaError_t Allocate(Allocations& all, void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(pointer, kAlignment, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xff, bytes);
  all.emplace(static_cast<const char*>(*pointer), bytes);
  return cudaSuccess;
}

// Checks that source and destination of a copy are in the kind of memory that `kind` states.
cudaError_t CheckCopy(Runtime& r, const void* to, const void* from, size_t to_bytes,
                      size_t from_bytes, cudaMemcpyKind kind) {
  const Where to_device = Find(r.device_memory, to, to_bytes);
  const Where from_device = Find(r.device_memory, from, from_bytes);
  if (to_device == Where::kOverrun || from_device == Where::kOverrun) return cudaErrorInvalidValue;
  if (kind == cudaMemcpyDefault) return cudaSuccess;
  const bool to_must = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_must = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if ((to_device == Where::kInside) != to_must) return cudaErrorInvalidValue;
  if ((from_device == Where::kInside) != from_must) return cudaErrorInvalidValue;
  return cudaSuccess;
}

}  // namespace

Runtime& TheRuntime() {
  static Runtime* const runtime = [] {
    auto* r = new Runtime;
    if (const char* count = std::getenv("MOESERVE_EMULATOR_MULTIPROCESSORS"); count != nullptr) {
      r->multiprocessors = std::max(1, std::atoi(count));
    }
    return r;
  }();
  return *runtime;
}

cudaError_t Report(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidMemcpyDirection:
      return "cudaErrorInvalidMemcpyDirection";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorInvalidClusterSize:
      return "cudaErrorInvalidClusterSize";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureMerge:
      return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched:
      return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined:
      return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation:
      return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit:
      return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent:
      return "cudaErrorCapturedEvent";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    default:
      return cudaGetErrorName(error);
  }
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return Report(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return Report(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "emulated device");
  properties->major = TheRuntime().capability;
  properties->multiProcessorCount = TheRuntime().multiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->l2CacheSize = 50 << 20;
  properties->persistingL2CacheMaxSize = 32 << 20;
  properties->accessPolicyMaxWindowSize = 128 << 20;
  properties->totalGlobalMem = kDeviceBytes;
  properties->sharedMemPerBlock = kSharedDefault;
  properties->sharedMemPerBlockOptin = kSharedOptin;
  properties->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  properties->regsPerMultiprocessor = 65536;
  properties->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return Report(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kSharedDefault;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = TheRuntime().multiprocessors;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kThreadsPerMultiprocessor;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = TheRuntime().capability;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kSharedPerMultiprocessor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedOptin;
      return cudaSuccess;
  }
  return Report(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  *total = kDeviceBytes;
  *free = kDeviceBytes - r.device_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (const cudaError_t error = ForbiddenInCapture(r, cudaErrorStreamCaptureUnsupported);
      error != cudaSuccess) {
    return Report(error);
  }
  *pointer = nullptr;
  if (bytes > kDeviceBytes - r.device_bytes) return Report(cudaErrorMemoryAllocation);
  const cudaError_t error = Allocate(r.device_memory, pointer, bytes);
  if (error == cudaSuccess) r.device_bytes += bytes;
  return Report(error);
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (const cudaError_t error = ForbiddenInCapture(r, cudaErrorStreamCaptureUnsupported);
      error != cudaSuccess) {
    return Report(error);
  }
  RunAll(r);
  const auto it = r.device_memory.find(static_cast<const char*>(pointer));
  if (it == r.device_memory.end()) return Report(cudaErrorInvalidValue);
  r.device_bytes -= it->second;
  r.device_memory.erase(it);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (const cudaError_t error = ForbiddenInCapture(r, cudaErrorStreamCaptureUnsupported);
      error != cudaSuccess) {
    return Report(error);
  }
  return Report(Allocate(r.pinned_memory, pointer, bytes));
}

cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  RunAll(r);
  if (r.pinned_memory.erase(static_cast<const char*>(pointer)) == 0) {
    return Report(cudaErrorInvalidValue);
  }
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (width > to_pitch || width > from_pitch) return Report(cudaErrorInvalidValue);
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  const cudaError_t error = CheckCopy(r, to, from, to_pitch * (height - 1) + width,
                                      from_pitch * (height - 1) + width, kind);
  if (error != cudaSuccess) return Report(error);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  return Report(Enqueue(r, s, [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memmove(static_cast<char*>(to) + row * to_pitch,
                   static_cast<const char*>(from) + row * from_pitch, width);
    }
  }));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (const cudaError_t error = ForbiddenInCapture(r, cudaErrorStreamCaptureImplicit);
      error != cudaSuccess) {
    return Report(error);
  }
  const cudaError_t error =
      cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  if (error != cudaSuccess) return error;
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, kind);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (Find(r.device_memory, to, bytes) != Where::kInside) return Report(cudaErrorInvalidValue);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  return Report(Enqueue(r, s, [=] { std::memset(to, value, bytes); }));
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (const cudaError_t error = ForbiddenInCapture(r, cudaErrorStreamCaptureImplicit);
      error != cudaSuccess) {
    return Report(error);
  }
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

cudaError_t EmulatedSetFunctionAttribute(const void* function, cudaFuncAttribute attribute,
                                         int value) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || value > kSharedOptin) return Report(cudaErrorInvalidValue);
    r.max_dynamic_shared[function] = value;
  } else if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    if (value != 0) {
      r.large_clusters.insert(function);
    } else {
      r.large_clusters.erase(function);
    }
  }
  return cudaSuccess;
}

namespace {

int MaxDynamicShared(Runtime& r, const void* function) {
  const auto it = r.max_dynamic_shared.find(function);
  return it == r.max_dynamic_shared.end() ? kSharedDefault : it->second;
}

}  // namespace

cudaError_t EmulatedOccupancy(int* blocks, const void* function, int threads, size_t shared_bytes) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  *blocks = 0;
  if (threads < 1 || threads > 1024) return Report(cudaErrorInvalidValue);
  if (shared_bytes > static_cast<size_t>(MaxDynamicShared(r, function))) return cudaSuccess;
  // The system reserves one kilobyte of shared memory per block.
  const int by_shared = kSharedPerMultiprocessor / (static_cast<int>(shared_bytes) + 1024);
  const int by_threads = kThreadsPerMultiprocessor / ((threads + 31) / 32 * 32);
  *blocks = std::min(kBlocksPerMultiprocessor, std::min(by_shared, by_threads));
  return cudaSuccess;
}

void SetEmulatedMultiprocessors(int count) { TheRuntime().multiprocessors = count; }
void SetEmulatedCapability(int major) { TheRuntime().capability = major; }

EmulatedKernel EmulatedKernelOf(const cudaLaunchConfig_t& config, const void* function) {
  EmulatedKernel kernel;
  kernel.function = function;
  kernel.grid = config.gridDim;
  kernel.block = config.blockDim;
  kernel.shared_bytes = config.dynamicSmemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& size = attribute.val.clusterDim;
      kernel.cluster = dim3(size.x, size.y, size.z);
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      kernel.overlaps = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return kernel;
}

namespace {

cudaError_t CheckCluster(Runtime& r, const EmulatedKernel& kernel) {
  const dim3& size = kernel.cluster;
  if (size.x == 0 || size.y == 0 || size.z == 0) return cudaErrorInvalidClusterSize;
  const uint64_t blocks = uint64_t{size.x} * size.y * size.z;
  if (blocks == 1) return cudaSuccess;
  if (r.capability < 9 || blocks > kMaxClusterBlocks ||
      (blocks > kPortableClusterBlocks && !r.large_clusters.contains(kernel.function))) {
    return cudaErrorInvalidClusterSize;
  }
  const bool divides =
      kernel.grid.x % size.x == 0 && kernel.grid.y % size.y == 0 && kernel.grid.z % size.z == 0;
  return divides ? cudaSuccess : cudaErrorInvalidConfiguration;
}

}  // namespace

// Ignores that the blocks of a cluster must be in one cluster of multiprocessors.
cudaError_t EmulatedMaxActiveClusters(int* clusters, const EmulatedKernel& kernel) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  *clusters = 0;
  if (const cudaError_t error = CheckCluster(r, kernel); error != cudaSuccess) return Report(error);
  int blocks = 0;
  const cudaError_t error = EmulatedOccupancy(
      &blocks, kernel.function, static_cast<int>(kernel.block.x * kernel.block.y * kernel.block.z),
      kernel.shared_bytes);
  *clusters = blocks * r.multiprocessors /
              static_cast<int>(kernel.cluster.x * kernel.cluster.y * kernel.cluster.z);
  return error;
}

cudaError_t EmulatedEnqueueKernel(EmulatedKernel kernel, cudaStream_t stream) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  const dim3 grid = kernel.grid, block = kernel.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > kMaxGridYz ||
      grid.z > kMaxGridYz || threads == 0 || threads > 1024 || block.z > 64) {
    return Report(cudaErrorInvalidConfiguration);
  }
  if (kernel.shared_bytes > static_cast<size_t>(MaxDynamicShared(r, kernel.function))) {
    return Report(cudaErrorInvalidValue);
  }
  if (const cudaError_t error = CheckCluster(r, kernel); error != cudaSuccess) return Report(error);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  return Report(Enqueue(r, s, [kernel = std::move(kernel)] {
    Launch launch;
    launch.grid = kernel.grid;
    launch.block = kernel.block;
    launch.cluster = kernel.cluster;
    launch.shared_bytes = kernel.shared_bytes;
    launch.overlaps = kernel.overlaps;
    launch.arguments = const_cast<std::function<void()>*>(&kernel.run);
    launch.run = [](void* arguments) { (*static_cast<std::function<void()>*>(arguments))(); };
    RunLaunch(launch);
    ++kernels_run;
  }));
}

}  // namespace moeserve::emulator::names

namespace moeserve::emulator {

uint64_t KernelsRun() { return names::kernels_run; }

}  // namespace moeserve::emulator

// Includes the CUDA runtime, or the emulated device that replaces it in tests without a GPU. All
// code in kernels/cuda includes this file instead of CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(MOESERVE_CUDA_EMULATION)
#include "tests/cuda_emulator/cuda_emulator.h"
#else
#include <cuda_runtime.h>
#endif

namespace moeserve::cuda {

#if defined(MOESERVE_CUDA_EMULATION) || defined(__CUDACC__)

// Returns the block's dynamic shared memory, 1024-byte aligned; each kernel divides it into its
// buffers. Kernels use no static shared memory.
template <typename T>
__device__ __forceinline__ T* DynamicShared() {
#if defined(MOESERVE_CUDA_EMULATION)
  return static_cast<T*>(emulator::SharedBase());
#else
  extern __shared__ __align__(1024) unsigned char moeserve_dynamic_shared[];
  return reinterpret_cast<T*>(moeserve_dynamic_shared);
#endif
}

#endif

}  // namespace moeserve::cuda

// Device primitives of clusters of blocks (9.0a).
//
// The blocks of a cluster (LaunchShape::cluster) run at the same time and can access each other's
// shared memory, through 32-bit addresses that ClusterAddress() returns. A block may do so after a
// first ClusterSync(), which ensures that the others have started, and must not exit before a
// barrier after the last access of the others.
#pragma once

#include <cstring>

#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {

__device__ __forceinline__ uint32_t ClusterRank() {
#if defined(MOESERVE_CUDA_EMULATION)
  return emulator::ClusterRank();
#elif MOESERVE_HAS_SM90A
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}
__device__ __forceinline__ uint32_t ClusterBlocks() {
#if defined(MOESERVE_CUDA_EMULATION)
  return emulator::ClusterBlocks();
#elif MOESERVE_HAS_SM90A
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#else
  return 1;
#endif
}

// The barrier of all threads of the cluster that have not exited. After the wait, a thread sees
// what the others wrote before their arrivals, also in the shared memory of other blocks. All lanes
// of a warp must call these functions together, and each arrival needs its wait.
__device__ __forceinline__ void ClusterArrive() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::ClusterArrive();
#elif MOESERVE_HAS_SM90A
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::ClusterWait();
#elif MOESERVE_HAS_SM90A
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}

// Returns the address of what is at the same place as `shared` in the memory of the block `rank`.
__device__ __forceinline__ uint32_t ClusterAddress(const void* shared, uint32_t rank) {
#if defined(MOESERVE_CUDA_EMULATION)
  return emulator::MapToRank(SharedAddress(shared), rank);
#elif MOESERVE_HAS_SM90A
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(SharedAddress(shared)), "r"(rank));
  return address;
#else
  __trap();
  return 0;
#endif
}

// Load and store 4, 8 or 16 bytes in the shared memory of a block of the cluster; the address must
// be aligned to their size. The block's threads see a store after a barrier of the cluster or, with
// MbarrierWaitCluster(), after an arrival at an mbarrier in their memory that follows the store.
template <typename T>
__device__ __forceinline__ T ClusterLoad(uint32_t address) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  T value{};
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::ClusterLoad(&value, address, sizeof(T));
#elif MOESERVE_HAS_SM90A
  uint32_t w[sizeof(T) / 4];
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w[0]) : "r"(address) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(address)
                 : "memory");
  }
  memcpy(&value, w, sizeof(T));
#else
  __trap();
#endif
  return value;
}
template <typename T>
__device__ __forceinline__ void ClusterStore(uint32_t address, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::ClusterStore(address, &value, sizeof(T));
#elif MOESERVE_HAS_SM90A
  uint32_t w[sizeof(T) / 4];
  memcpy(w, &value, sizeof(T));
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(w[0]) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(w[0]), "r"(w[1])
                 : "memory");
  } else {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  }
#else
  __trap();
#endif
}
// Stores as ClusterStore(), but asynchronously, and reports the completion of the bytes to an
// mbarrier in the same block, which must expect them. A wait for that mbarrier makes them visible.
template <typename T>
__device__ __forceinline__ void ClusterStoreAsync(uint32_t address, T value, uint32_t barrier) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::StoreAsync(address, &value, sizeof(T), barrier);
#elif MOESERVE_HAS_SM90A
  uint32_t w[sizeof(T) / 4];
  memcpy(w, &value, sizeof(T));
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
        "r"(w[0]), "r"(barrier)
        : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(
            address),
        "r"(w[0]), "r"(w[1]), "r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(barrier)
        : "memory");
  }
#else
  __trap();
#endif
}

// Arrives at an mbarrier of a block of the cluster, at an address of ClusterAddress(). What this
// thread wrote before is visible to threads that wait for it with MbarrierWaitCluster().
__device__ __forceinline__ void MbarrierArriveCluster(uint32_t barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierArriveCluster(barrier);
#elif MOESERVE_HAS_SM90A
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
#else
  __trap();
#endif
}
// The same without making writes visible, in much less time (MEMBAR and ERRBAR of the device). For
// buffers that wgmma or the copy engine has finished reading and that the copy engine will
// overwrite; the waiting threads may use MbarrierWait().
__device__ __forceinline__ void MbarrierReleaseCluster(uint32_t barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierArriveCluster(barrier, false);
#elif MOESERVE_HAS_SM90A
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  __trap();
#endif
}
// As MbarrierWait(), for an mbarrier of the own block at which other blocks have arrived.
__device__ __forceinline__ void MbarrierWaitCluster(uint64_t* barrier, uint32_t parity) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierWait(barrier, parity, true);
#elif MOESERVE_HAS_SM90A
  uint32_t ended = 0;
  while (ended == 0) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(ended)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
#else
  __trap();
#endif
}

// As CopyBulkAsync(), into every block of the cluster whose bit is set in `mask`: to the place of
// `shared` in its memory, with completion at the mbarrier at the place of `barrier`.
__device__ __forceinline__ void CopyBulkMulticast(void* shared, const void* global, uint32_t bytes,
                                                  uint64_t* barrier, uint32_t mask) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncBulkMulticast(shared, global, bytes, barrier, mask);
#elif MOESERVE_HAS_SM90A
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(SharedAddress(barrier)),
      "h"(static_cast<uint16_t>(mask))
      : "memory");
#else
  __trap();
#endif
}
// Copies from this block's shared memory to an address in a block of the cluster; `barrier` is the
// address of an mbarrier of that block, which must expect the bytes. The source must stay
// unchanged, and this block must not exit, until that block has waited for its mbarrier.
// FenceAsyncShared() must follow the writes of the source.
__device__ __forceinline__ void CopyBulkCluster(uint32_t to, const void* shared, uint32_t bytes,
                                                uint32_t barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncBulkCluster(to, shared, bytes, barrier);
#elif MOESERVE_HAS_SM90A
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(SharedAddress(shared)), "r"(bytes), "r"(barrier)
      : "memory");
#else
  __trap();
#endif
}

}  // namespace moeserve::cuda

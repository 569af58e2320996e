// Functions that the routing kernels share: sums over a warp, and finding the last block to arrive.
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Returns, in every lane, the sum over the lanes with the bits of ContractTreeSum()
// (kernels/base/routing.h).
__device__ inline float WarpTreeSum(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    v = v + __shfl_xor_sync(kFullMask, v, distance);
  }
  return v;
}

__device__ inline int32_t WarpInclusiveScan(int32_t v, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t below = __shfl_up_sync(kFullMask, v, distance);
    if (lane >= distance) v += below;
  }
  return v;
}

// Computes the sums over the lanes, as a tree, of kCount values at once. The sums are distributed
// over the lanes, so each level of the tree halves the number of values that a lane holds.
// Afterwards v[0 .. max(1, kCount / 32)) of lane l are the sums from index TreeSumIndex(l) on.
template <int kCount, int kDistance = 16>
__device__ __forceinline__ void SpreadTreeSums(float* v, int lane) {
  if constexpr (kDistance > 0) {
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
      const bool upper = (lane & kDistance) != 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float sent = upper ? v[i] : v[i + kHalf];
        const float kept = upper ? v[i + kHalf] : v[i];
        v[i] = kept + __shfl_xor_sync(kFullMask, sent, kDistance);
      }
      SpreadTreeSums<kHalf, kDistance / 2>(v, lane);
    } else {
      v[0] = v[0] + __shfl_xor_sync(kFullMask, v[0], kDistance);
      SpreadTreeSums<1, kDistance / 2>(v, lane);
    }
  }
}

// Returns the index of the first sum that lane l holds. With fewer than 32 sums, several lanes hold
// the same sum.
template <int kCount>
__device__ constexpr int TreeSumIndex(int lane) {
  return kCount >= 32 ? lane * (kCount / 32) : lane / (32 / kCount);
}

// Adds 1 to the counter and returns the old value. If there is a barrier before and after the call,
// the block's earlier writes and later reads are ordered with those of other blocks that call this
// function. This is cheaper than fences, which also wait for all other memory traffic.
__device__ __forceinline__ int32_t Arrive(int32_t* counter) {
#if defined(MOESERVE_CUDA_EMULATION)
  return atomicAdd(counter, 1);
#else
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
#endif
}

// Returns true in all threads of the last of `expected` blocks that call this function. In that
// block, earlier writes of the other blocks to global memory are visible through __ldcg. The last
// block resets the counter to 0. `flag` is a word of shared memory that must not be used for
// anything else.
__device__ inline bool LastToArrive(int32_t* counter, int expected, int32_t* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = Arrive(counter) == expected - 1;
    if (last) *counter = 0;
    *flag = last;
  }
  __syncthreads();
  return *flag != 0;
}

}  // namespace moeserve::cuda

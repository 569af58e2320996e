// Small pieces that the routing kernels share: sums over a warp, the last block to arrive.
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// l + (l ^ 16), then ^ 8 and so on, the contract's order: every lane has the sum.
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

// Tree sums of kCount values per lane at once: the sums end up spread over the lanes, so that each
// step halves what a lane still holds. Afterwards lane l holds in v[0 .. max(1, kCount / 32)) the
// sums from TreeSumIndex() on.
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

// First of the values that lane l holds; lanes that share one have the same.
template <int kCount>
__device__ constexpr int TreeSumIndex(int lane) {
  return kCount >= 32 ? lane * (kCount / 32) : lane / (32 / kCount);
}

// Adds 1 and returns the old value. With a barrier before and after it, orders the block's earlier
// writes and later reads against the other blocks that call this. Cheaper than fences, which wait
// for all other memory traffic as well.
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

// True in all threads of the last of `expected` blocks to call this; earlier writes of the others
// to global memory are then visible through __ldcg. Resets the counter to 0. `flag` is a word of
// shared memory used for nothing else.
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

// Functions that the routing kernels share: loads, sums over a warp, and finding the last block to
// arrive.
#pragma once

#include "kernels/base/routing.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"

namespace moeserve::cuda {

// In sums, a lane adds every kRouterStep / kRoutingGroup-th group of elements.
static_assert(kRouterStep == kRoutingLanes * kRoutingGroup);

// Loads from an array in shared memory, or in global memory that other blocks have written.
template <typename T>
__device__ __forceinline__ T LoadWritten(const T* p, bool in_shared) {
  return in_shared ? *p : __ldcg(p);
}

// The products of a row.
struct RowProducts {
  const float* values;
  bool in_shared;

  __device__ __forceinline__ float operator[](int i) const {
    return LoadWritten(values + i, in_shared);
  }
};

// Calls f(v[i]) in ascending order for the elements i < n of the group from `begin` on. v is in
// shared memory, 16-byte aligned.
template <typename F>
__device__ __forceinline__ void ForGroup(const float* v, int begin, int n, const F& f) {
  if (begin + kRoutingGroup <= n) {
    const float4 low = *reinterpret_cast<const float4*>(v + begin);
    const float4 high = *reinterpret_cast<const float4*>(v + begin + 4);
    f(low.x), f(low.y), f(low.z), f(low.w);
    f(high.x), f(high.y), f(high.z), f(high.w);
  } else {
#pragma unroll 1
    for (int i = begin; i < n; ++i) f(v[i]);
  }
}

// Returns, in every lane, the sum over the lanes with the bits of ContractTreeSum()
// (kernels/base/routing.h).
__device__ inline float WarpTreeSum(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    v = v + __shfl_xor_sync(kFullMask, v, distance);
  }
  return v;
}

// Returns, in every lane, the sum of n values in shared memory, 16-byte aligned, with the bits of
// ContractSum().
__device__ __forceinline__ float WarpSum(const float* values, int n, int lane) {
  float sum = 0.0f;
#pragma unroll 1
  for (int begin = lane * kRoutingGroup; begin < n; begin += kRouterStep) {
    ForGroup(values, begin, n, [&](float v) { sum += v; });
  }
  return WarpTreeSum(sum);
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
// function. On GPUs, this takes a fence of the device's memory, an atomic operation in the
// second-level cache, and the invalidation of the first-level cache.
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

// Sums, maxima and searches of the sampler. All are exact and do not depend on an order.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {
namespace {

struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Largest {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
// Returns the larger upper half and, separately, the larger lower half.
struct LargestHalves {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const {
    const uint64_t high = (a >> 32) > (b >> 32) ? a : b;
    const uint32_t low = max(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
    return (high & 0xffffffff00000000u) | low;
  }
};

template <typename T, typename Op>
__device__ __forceinline__ T WarpReduce(T value, Op op) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// The first lane at which the running sum of the lanes' amounts exceeds a target, and the sum
// before that lane.
struct Place {
  int lane;  // -1 if the total does not exceed the target
  uint64_t before;
};
__device__ __forceinline__ Place WarpFind(uint64_t amount, uint64_t target) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint64_t running = amount;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kFullMask, running, offset);
    if (lane >= offset) running += below;
  }
  const int found = __ffs(static_cast<int>(__ballot_sync(kFullMask, running > target))) - 1;
  return {found, __shfl_sync(kFullMask, running - amount, max(found, 0))};
}

// Returns a key that is larger for a more probable token (of equal logits, for the lower id); never
// 0.
__device__ __forceinline__ uint64_t Probability(float logit, int token) {
  return static_cast<uint64_t>(OrderOfF32(logit)) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ int TokenOf(uint64_t probability) {
  return static_cast<int>(~static_cast<uint32_t>(probability));
}

// A sum of at most 2^23 values in [0, 1], each rounded down to a multiple of 2^-80: exact in any
// order.
struct ShareSum {
  uint64_t high = 0;  // in units of 2^-40
  uint64_t low = 0;   // in units of 2^-80

  __device__ void Add(float share) {
    const float scaled = share >= 0.0f ? share * 0x1p+40f : 0.0f;  // NaN does not count
    const auto whole = static_cast<uint64_t>(scaled);
    high += whole;
    low += static_cast<uint64_t>((scaled - static_cast<float>(whole)) * 0x1p+40f);
  }
  // Returns NaN if the highest logit is infinite.
  __device__ double Value(float highest) const {
    return static_cast<double>(high) * 0x1p-40 + static_cast<double>(low) * 0x1p-80 +
           static_cast<double>(highest - highest);
  }
};

}  // namespace
}  // namespace moeserve::cuda

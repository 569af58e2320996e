// The norm of one vector, computed by a team of threads: a warp, or all threads of a block.
//
// Thread `lane` of a team processes the four elements from 4 * lane on, then the four elements that
// are 4 * (threads of the team) further, and so on, and adds them in that order, no matter how they
// are loaded. So the order of a sum depends only on the width of the vector and the size of the
// team, and the size of the team depends only on the widths in the bank.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

inline constexpr int kNormBlock = 256;
// The number of floats of shared memory that a block needs for the norm of one vector.
inline constexpr int kNormSharedFloats = 2 * kNormBlock / 32;

// Returns the number of threads in a team. `width` is the width of the widest vector in the bank.
MOESERVE_HOST_DEVICE constexpr int NormTeam(int width) { return width <= 512 ? 32 : kNormBlock; }

__device__ __forceinline__ bool Aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Loads four adjacent elements, of which only the first `count` >= 1 exist; the others become
// zeros.
__device__ __forceinline__ float4 LoadFour(const float* x, int count, bool aligned) {
  if (aligned && count >= 4) return *reinterpret_cast<const float4*>(x);
  float4 v = make_float4(x[0], 0.0f, 0.0f, 0.0f);
  if (count > 1) v.y = x[1];
  if (count > 2) v.z = x[2];
  if (count > 3) v.w = x[3];
  return v;
}

__device__ __forceinline__ void StoreFour(float* x, int count, bool aligned, const float4& v) {
  if (aligned && count >= 4) {
    *reinterpret_cast<float4*>(x) = v;
    return;
  }
  x[0] = v.x;
  if (count > 1) x[1] = v.y;
  if (count > 2) x[2] = v.z;
  if (count > 3) x[3] = v.w;
}

// A thread's elements of its team's vector: up to kHeld groups of four are held in registers,
// further ones are in memory.
struct NormVector {
  static constexpr int kHeld = 4;

  float* x = nullptr;
  int n = 0;  // width of the vector; 0 for threads of the block that are not in the team
  int lane = 0;
  int threads = 0;
  bool aligned = false;
  float4 held[kHeld] = {};

  // Calls body(j, c, v) with the four elements v from x[c] on. j is their index in `held`, or kHeld
  // if they are not held.
  template <typename Body>
  __device__ __forceinline__ void ForFours(const Body& body) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int c = 4 * (lane + j * threads);
      if (c < n) body(j, c, held[j]);
    }
    for (int c = 4 * (lane + kHeld * threads); c < n; c += 4 * threads) {
      float4 v = LoadFour(x + c, n - c, aligned);
      body(kHeld, c, v);
    }
  }
  // Loads the elements of `from` at the indices that this thread processes into `to`.
  __device__ __forceinline__ void Load(const float* from, float4 (&to)[kHeld]) const {
    const bool whole = Aligned16(from);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int c = 4 * (lane + j * threads);
      if (c < n) to[j] = LoadFour(from + c, n - c, whole);
    }
  }
  __device__ __forceinline__ void Load() { Load(x, held); }

  // Returns the result of sum = add(sum, element) over the thread's elements, starting with sum =
  // 0.
  template <typename Add>
  __device__ __forceinline__ float Sum(const Add& add) {
    float sum = 0.0f;
    ForFours([&](int, int c, const float4& v) {
      sum = add(sum, v.x);
      if (c + 1 < n) sum = add(sum, v.y);
      if (c + 2 < n) sum = add(sum, v.z);
      if (c + 3 < n) sum = add(sum, v.w);
    });
    return sum;
  }
};

// With kBlock: returns, in all threads of the team, the sum over its first `warps` warps (a power
// of two); contains a barrier of the block. Without: returns the sum over the warp. `lane` is the
// thread's index in its team. `shared` has one float per warp of the team; each call needs memory
// of its own.
template <bool kBlock>
__device__ __forceinline__ float TeamSum(float v, int lane, int warps, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullMask, v, offset);
  if constexpr (kBlock) {
    if (lane % 32 == 0) shared[lane / 32] = v;
    __syncthreads();
    v = shared[lane % warps];
    for (int offset = warps / 2; offset > 0; offset /= 2) {
      v += __shfl_xor_sync(kFullMask, v, offset);
    }
  }
  return v;
}

// Normalises an element: (element - mean) * factor * scale.
struct NormFactors {
  float mean = 0.0f;
  float factor = 1.0f;

  __device__ __forceinline__ float operator()(float x, float scale) const {
    return (x - mean) * factor * scale;
  }
  __device__ __forceinline__ float4 operator()(const float4& x, const float4& scale) const {
    return make_float4((*this)(x.x, scale.x), (*this)(x.y, scale.y), (*this)(x.z, scale.z),
                       (*this)(x.w, scale.w));
  }
};

// Returns the factors for a vector of `width` elements; vector.Load() must have been called. With
// kBlock, all threads of the block must call this, threads without a vector with n = 0. Without,
// each warp has its own vector. `shared` [kNormSharedFloats] is the team's and must not be reused
// without a barrier.
template <bool kBlock>
__device__ __forceinline__ NormFactors FactorsOf(NormVector& vector, int width, bool layer,
                                                 float eps, float* shared) {
  const int warps = vector.threads / 32;
  const float n = static_cast<float>(width);
  NormFactors f;
  if (layer) {
    const float sum = vector.Sum([](float s, float v) { return s + v; });
    f.mean = TeamSum<kBlock>(sum, vector.lane, warps, shared) / n;
  }
  const float mean = f.mean;
  const float square = vector.Sum([mean](float s, float v) { return fmaf(v - mean, v - mean, s); });
  const float variance =
      TeamSum<kBlock>(square, vector.lane, warps, shared + kNormSharedFloats / 2) / n;
  f.factor = 1.0f / sqrtf(variance + eps);
  return f;
}

}  // namespace moeserve::cuda

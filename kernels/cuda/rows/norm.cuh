// The norm of one vector by a team of threads: a warp, or all threads of a block.
//
// Thread `lane` of a team has the four elements from 4 * lane on, the four that lie 4 * threads
// further on, and so on, and adds them up in that order, however they are loaded. So the order of a
// sum depends on the width and the size of the team alone, which depends on the widths of the bank.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

inline constexpr int kNormBlock = 256;
// Floats of shared memory that a block needs for the norm of one vector.
inline constexpr int kNormSharedFloats = 2 * kNormBlock / 32;

// Threads of a team; `width`: of the widest vector of the bank.
MOESERVE_HOST_DEVICE constexpr int NormTeam(int width) { return width <= 512 ? 32 : kNormBlock; }

__device__ __forceinline__ bool Aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Four adjacent elements of which `count` >= 1 exist; zeros for the others.
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

// A thread's elements of its team's vector: up to kHeld fours in registers, the others in memory.
struct NormVector {
  static constexpr int kHeld = 4;

  float* x = nullptr;
  int n = 0;  // 0 for threads of the block that are not in the team
  int lane = 0;
  int threads = 0;
  bool aligned = false;
  float4 held[kHeld] = {};

  // Calls body(j, c, v) with the four elements v from x[c] on; j is kHeld where they are not held.
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
  // Loads the same places of `from` into `to`.
  __device__ __forceinline__ void Load(const float* from, float4 (&to)[kHeld]) const {
    const bool whole = Aligned16(from);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int c = 4 * (lane + j * threads);
      if (c < n) to[j] = LoadFour(from + c, n - c, whole);
    }
  }
  __device__ __forceinline__ void Load() { Load(x, held); }

  // add(sum, element) over the thread's elements, from 0 on.
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

// Sum over the first `warps` warps of the block (a power of two), which all of its threads get; or
// over the warp. `shared` has room for a float of each warp and is used once.
template <bool kBlock>
__device__ __forceinline__ float TeamSum(float v, int warps, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullMask, v, offset);
  if constexpr (kBlock) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = shared[static_cast<int>(threadIdx.x) % warps];
    for (int offset = warps / 2; offset > 0; offset /= 2) {
      v += __shfl_xor_sync(kFullMask, v, offset);
    }
  }
  return v;
}

// Normalises an element before scale and shift: (element - mean) * factor.
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

// Of a vector of `width` elements whose fours are held. kBlock: all threads of the block take part,
// those outside of the team with n = 0; else every warp has a vector of its own. `shared`
// [kNormSharedFloats] is used once.
template <bool kBlock>
__device__ __forceinline__ NormFactors FactorsOf(NormVector& vector, int width, bool layer,
                                                 float eps, float* shared) {
  const int warps = vector.threads / 32;
  const float n = static_cast<float>(width);
  NormFactors f;
  if (layer) {
    const float sum = vector.Sum([](float s, float v) { return s + v; });
    f.mean = TeamSum<kBlock>(sum, warps, shared) / n;
  }
  const float mean = f.mean;
  const float square = vector.Sum([mean](float s, float v) { return fmaf(v - mean, v - mean, s); });
  const float variance = TeamSum<kBlock>(square, warps, shared + kNormSharedFloats / 2) / n;
  f.factor = 1.0f / sqrtf(variance + eps);
  return f;
}

}  // namespace moeserve::cuda

// Access to rows of f32, bf16 or f16 elements, one by one or four at a time, and launches over
// them.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/base/dtype.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/rows/norm.cuh"

namespace moeserve::cuda {

inline constexpr int kRowThreads = 256;
// Elements per access of a thread, if widths and addresses allow vectors.
inline constexpr int kRowVector = 4;

// A RowsView in the form that kernels take.
struct Rows {
  char* data;
  int64_t stride;  // elements
  int dtype;
};

inline Rows RowsOf(const RowsView& v) {
  return {static_cast<char*>(v.data), v.stride, static_cast<int>(v.dtype)};
}

__device__ __forceinline__ float LoadElement(const void* data, int dtype, int64_t i) {
  if (dtype == static_cast<int>(DType::kF32)) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == static_cast<int>(DType::kBF16) ? F32FromBf16(bits) : F32FromF16(bits);
}

__device__ __forceinline__ float Load(const Rows& rows, int64_t r, int64_t c) {
  return LoadElement(rows.data, rows.dtype, r * rows.stride + c);
}

__device__ __forceinline__ void Store(const Rows& rows, int64_t r, int64_t c, float v) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    reinterpret_cast<float*>(rows.data)[i] = v;
  } else {
    reinterpret_cast<uint16_t*>(rows.data)[i] = Bf16FromF32(v);
  }
}

// Loads kRowVector adjacent elements; the address must be a multiple of their total size.
__device__ __forceinline__ float4 LoadVector(const Rows& rows, int64_t r, int64_t c) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    return *reinterpret_cast<const float4*>(rows.data + i * 4);
  }
  const uint2 bits = *reinterpret_cast<const uint2*>(rows.data + i * 2);
  return make_float4(F32FromBits(bits.x << 16), F32FromBits(bits.x & 0xffff0000u),
                     F32FromBits(bits.y << 16), F32FromBits(bits.y & 0xffff0000u));
}

// The address must be a multiple of the elements' total size.
__device__ __forceinline__ void Store(const Rows& rows, int64_t r, int64_t c, float4 v) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    *reinterpret_cast<float4*>(rows.data + i * 4) = v;
    return;
  }
  uint2 bits;
  bits.x = Bf16FromF32(v.x) | static_cast<uint32_t>(Bf16FromF32(v.y)) << 16;
  bits.y = Bf16FromF32(v.z) | static_cast<uint32_t>(Bf16FromF32(v.w)) << 16;
  *reinterpret_cast<uint2*>(rows.data + i * 2) = bits;
}

// Loads kRowVector elements, as LoadVector(), or one.
template <bool kVectors>
__device__ __forceinline__ auto Load(const Rows& rows, int64_t r, int64_t c) {
  if constexpr (kVectors) {
    return LoadVector(rows, r, c);
  } else {
    return Load(rows, r, c);
  }
}
template <bool kVectors>
__device__ __forceinline__ auto Load(const float* p) {
  if constexpr (kVectors) {
    return *reinterpret_cast<const float4*>(p);
  } else {
    return *p;
  }
}

inline bool TakesVectors(const RowsView& v) {
  return v.cols % kRowVector == 0 && v.stride % kRowVector == 0 &&
         reinterpret_cast<uintptr_t>(v.data) % (kRowVector * SizeOf(v.dtype)) == 0;
}

// The grid for row-wise kernels: one thread per `per_thread` columns, and separate blocks for every
// row.
struct RowGrid {
  dim3 grid;
  dim3 block;
};

inline RowGrid GridOver(int64_t rows, int64_t cols, int per_thread) {
  const int64_t units = (cols + per_thread - 1) / per_thread;
  const int threads = units >= kRowThreads ? kRowThreads : static_cast<int>((units + 31) / 32 * 32);
  // The rows are the grid's x dimension, because only that one can be as large as 2^31.
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>((units + threads - 1) / threads)),
          dim3(static_cast<unsigned>(threads))};
}

// Launches Kernel<true> or Kernel<false> over all columns of `view`; launches nothing if `view` is
// empty.
#define MOESERVE_LAUNCH_ROWS(Kernel, vectors, view, stream, ...)                           \
  do {                                                                                     \
    if ((view).rows == 0 || (view).cols == 0) break;                                       \
    const bool by_vectors = (vectors);                                                     \
    const RowGrid shape = GridOver((view).rows, (view).cols, by_vectors ? kRowVector : 1); \
    const LaunchShape launch{shape.grid, shape.block, 0, stream, true};                    \
    by_vectors ? Launch(Kernel<true>, launch, __VA_ARGS__)                                 \
               : Launch(Kernel<false>, launch, __VA_ARGS__);                               \
  } while (false)

template <bool kVectors, typename Body>
__device__ __forceinline__ void ForColumns(int cols, const Body& body) {
  const int unit = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int c = kVectors ? unit * kRowVector : unit;
  if (c < cols) body(c);
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator*(float a, float4 b) {
  return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}
__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 MultiplyAdd(float a, float4 x, float4 y) {
  return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}
__device__ __forceinline__ float MultiplyAdd(float a, float x, float y) { return fmaf(a, x, y); }

// Returns f of each element.
template <typename F>
__device__ __forceinline__ float Map(const F& f, float v) {
  return f(v);
}
template <typename F>
__device__ __forceinline__ float4 Map(const F& f, float4 v) {
  return make_float4(f(v.x), f(v.y), f(v.z), f(v.w));
}

// Stores the first `count` >= 1 of four adjacent elements.
__device__ __forceinline__ void StoreRowFour(const Rows& rows, int64_t r, int64_t c, int count,
                                             const float4& v) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    float* out = reinterpret_cast<float*>(rows.data) + i;
    StoreFour(out, count, Aligned16(out), v);
  } else if (count >= 4 && reinterpret_cast<uintptr_t>(rows.data + i * 2) % 8 == 0) {
    Store(rows, r, c, v);
  } else {
    Store(rows, r, c, v.x);
    if (count > 1) Store(rows, r, c + 1, v.y);
    if (count > 2) Store(rows, r, c + 2, v.z);
    if (count > 3) Store(rows, r, c + 3, v.w);
  }
}

// Loads four adjacent elements, of which only the first `count` >= 1 exist; the others become
// zeros.
__device__ __forceinline__ float4 LoadRowFour(const Rows& rows, int64_t r, int64_t c, int count) {
  const int64_t i = r * rows.stride + c;
  if (rows.dtype == static_cast<int>(DType::kF32)) {
    const float* from = reinterpret_cast<const float*>(rows.data) + i;
    return LoadFour(from, count, Aligned16(from));
  }
  if (count >= 4 && reinterpret_cast<uintptr_t>(rows.data + i * 2) % 8 == 0) {
    return LoadVector(rows, r, c);
  }
  float4 v = make_float4(Load(rows, r, c), 0.0f, 0.0f, 0.0f);
  if (count > 1) v.y = Load(rows, r, c + 1);
  if (count > 2) v.z = Load(rows, r, c + 2);
  if (count > 3) v.w = Load(rows, r, c + 3);
  return v;
}

}  // namespace moeserve::cuda

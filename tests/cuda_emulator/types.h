// Defines CUDA's function qualifiers and vector types for CUDA code that g++ compiles.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

namespace moeserve::emulator::names {

#define MOESERVE_VECTOR_TYPE2(name, type, alignment) \
  struct alignas(alignment) name {                   \
    type x, y;                                       \
  };                                                 \
  static inline name make_##name(type x, type y) { return name{x, y}; }
#define MOESERVE_VECTOR_TYPE4(name, type, alignment) \
  struct alignas(alignment) name {                   \
    type x, y, z, w;                                 \
  };                                                 \
  static inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }

MOESERVE_VECTOR_TYPE2(char2, signed char, 2)
MOESERVE_VECTOR_TYPE2(uchar2, unsigned char, 2)
MOESERVE_VECTOR_TYPE2(short2, short, 4)
MOESERVE_VECTOR_TYPE2(ushort2, unsigned short, 4)
MOESERVE_VECTOR_TYPE2(int2, int, 8)
MOESERVE_VECTOR_TYPE2(uint2, unsigned, 8)
MOESERVE_VECTOR_TYPE2(float2, float, 8)
MOESERVE_VECTOR_TYPE2(double2, double, 16)
MOESERVE_VECTOR_TYPE2(longlong2, long long, 16)
MOESERVE_VECTOR_TYPE2(ulonglong2, unsigned long long, 16)
MOESERVE_VECTOR_TYPE4(char4, signed char, 4)
MOESERVE_VECTOR_TYPE4(uchar4, unsigned char, 4)
MOESERVE_VECTOR_TYPE4(short4, short, 8)
MOESERVE_VECTOR_TYPE4(ushort4, unsigned short, 8)
MOESERVE_VECTOR_TYPE4(int4, int, 16)
MOESERVE_VECTOR_TYPE4(uint4, unsigned, 16)
MOESERVE_VECTOR_TYPE4(float4, float, 16)

#undef MOESERVE_VECTOR_TYPE2
#undef MOESERVE_VECTOR_TYPE4

struct uint3 {
  unsigned x, y, z;
};
struct int3 {
  int x, y, z;
};
struct float3 {
  float x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

}  // namespace moeserve::emulator::names

namespace moeserve::emulator {
using namespace names;  // NOLINT
}

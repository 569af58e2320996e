// Arithmetic intrinsics, atomics, fences and cached loads.
//
// The emulator never runs two threads at the same time, so atomics are plain read-modify-write
// operations.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator::names {

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __popcll(unsigned long long v) { return std::popcount(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return std::countl_zero(static_cast<unsigned long long>(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= ((v >> i) & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long v) {
  return (static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32) |
         __brev(static_cast<unsigned>(v >> 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((int64_t{a} * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t{b} << 32) | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = (selector >> (4 * i)) & 7u;
    r |= static_cast<unsigned>((bytes >> (8 * s)) & 0xffu) << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((uint64_t{high} << 32) | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32) | low) >> (shift & 31u));
}

inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline long long __double_as_longlong(double v) { return std::bit_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return std::bit_cast<double>(v); }

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / std::sqrt(double{a})); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float rsqrtf(float a) { return __frsqrt_rn(a); }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __float2int_rz(float a) { return static_cast<int>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }

#define MOESERVE_MIN_MAX(type)                                 \
  constexpr type min(type a, type b) { return b < a ? b : a; } \
  constexpr type max(type a, type b) { return a < b ? b : a; }
MOESERVE_MIN_MAX(int)
MOESERVE_MIN_MAX(unsigned)
MOESERVE_MIN_MAX(long)
MOESERVE_MIN_MAX(unsigned long)
MOESERVE_MIN_MAX(long long)
MOESERVE_MIN_MAX(unsigned long long)
#undef MOESERVE_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

template <typename T, typename F>
inline T EmulatedAtomic(T* address, F f) {
  const T old = *address;
  *address = f(old);
  return old;
}

#define MOESERVE_ATOMICS(type)                                             \
  inline type atomicExch(type* address, type v) {                          \
    return EmulatedAtomic(address, [v](type) { return v; });               \
  }                                                                        \
  inline type atomicCAS(type* address, type expected, type v) {            \
    return EmulatedAtomic(address, [=](type old) {                         \
      return std::memcmp(&old, &expected, sizeof(old)) == 0 ? v : old;     \
    });                                                                    \
  }                                                                        \
  inline type atomicMin(type* address, type v) {                           \
    return EmulatedAtomic(address, [v](type old) { return min(old, v); }); \
  }                                                                        \
  inline type atomicMax(type* address, type v) {                           \
    return EmulatedAtomic(address, [v](type old) { return max(old, v); }); \
  }                                                                        \
  inline type atomicAnd(type* address, type v) {                           \
    return EmulatedAtomic(address, [v](type old) { return old & v; });     \
  }                                                                        \
  inline type atomicOr(type* address, type v) {                            \
    return EmulatedAtomic(address, [v](type old) { return old | v; });     \
  }                                                                        \
  inline type atomicXor(type* address, type v) {                           \
    return EmulatedAtomic(address, [v](type old) { return old ^ v; });     \
  }
MOESERVE_ATOMICS(int)
MOESERVE_ATOMICS(unsigned)
MOESERVE_ATOMICS(unsigned long long)
#undef MOESERVE_ATOMICS

inline int atomicAdd(int* address, int v) {
  return EmulatedAtomic(address, [v](int old) {
    return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(v));
  });
}
inline int atomicSub(int* address, int v) {
  return EmulatedAtomic(address, [v](int old) {
    return static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(v));
  });
}
inline unsigned atomicAdd(unsigned* address, unsigned v) {
  return EmulatedAtomic(address, [v](unsigned old) { return old + v; });
}
inline unsigned atomicSub(unsigned* address, unsigned v) {
  return EmulatedAtomic(address, [v](unsigned old) { return old - v; });
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long v) {
  return EmulatedAtomic(address, [v](unsigned long long old) { return old + v; });
}
inline float atomicAdd(float* address, float v) {
  return EmulatedAtomic(address, [v](float old) { return old + v; });
}
inline float atomicExch(float* address, float v) {
  return EmulatedAtomic(address, [v](float) { return v; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return EmulatedAtomic(address, [limit](unsigned old) { return old >= limit ? 0u : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return EmulatedAtomic(
      address, [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcs(const T* address) {
  return *address;
}
template <typename T>
inline T __ldca(const T* address) {
  return *address;
}
template <typename T>
inline void __stcg(T* address, T value) {
  *address = value;
}
template <typename T>
inline void __stcs(T* address, T value) {
  *address = value;
}

inline void __nanosleep(unsigned) { YieldThread(); }
[[noreturn]] inline void __trap() { Fail(Location::current(), "__trap"); }
inline long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace moeserve::emulator::names

// A vector of 16 float lanes in an array, for any processor. Only isa_plain.cc includes this file.
#pragma once

#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu::MOESERVE_ISA {

struct Vec {
  float lane[16];
};
inline constexpr int kRowTile = 4;
inline constexpr int kQuantRowTile = 4;
inline constexpr int kPanelTile = 1;
inline constexpr int kAttentionRows = 4;
inline constexpr int kAttentionAccumulators = 4;

inline Vec Broadcast(float v) {
  Vec r;
  for (float& f : r.lane) f = v;
  return r;
}
inline Vec Zero() { return Broadcast(0.0f); }
inline Vec Load(const float* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = p[i];
  return r;
}
inline void Store(float* p, Vec v) {
  for (int i = 0; i < 16; ++i) p[i] = v.lane[i];
}
// Rounds twice. A fused operation would be a library call in this file, and linear products need
// not have the same bits on every instruction set. Routing needs the same bits and calls
// ContractFma().
inline Vec Fma(Vec a, Vec b, Vec c) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
  return r;
}
// Rounds once, unlike Fma() in this file.
inline Vec ContractFma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 16; ++i) c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
inline Vec Mul(Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) a.lane[i] *= b.lane[i];
  return a;
}
inline Vec Abs(Vec v) {
  for (float& f : v.lane) f = __builtin_fabsf(f);
  return v;
}
// Returns the larger value of each lane; if `a` is NaN, the value of `b`.
inline Vec Max(Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
// Returns the smaller value of each lane; if `a` is NaN, the value of `b`.
inline Vec Min(Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
inline Vec Add(Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline Vec Sub(Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) a.lane[i] -= b.lane[i];
  return a;
}
inline Vec Div(Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) a.lane[i] /= b.lane[i];
  return a;
}
// Returns v, with 0 in the lanes in which a < b.
inline Vec ZeroWhereLess(Vec v, Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) v.lane[i] = a.lane[i] < b.lane[i] ? 0.0f : v.lane[i];
  return v;
}
// Returns v * 2^n, where n is the integer in the lowest bits of `integer`.
inline Vec AddExponent(Vec v, Vec integer) {
  for (int i = 0; i < 16; ++i) {
    v.lane[i] = F32FromBits(BitsFromF32(v.lane[i]) + (BitsFromF32(integer.lane[i]) << 23));
  }
  return v;
}
inline void StoreBf16(Bf16* p, Vec v) {
  for (int i = 0; i < 16; ++i) p[i] = Bf16FromF32(v.lane[i]);
}
inline float MaxOfLanes(Vec v) {
  float m = v.lane[0];
  for (float f : v.lane) m = f > m ? f : m;
  return m;
}
inline float SumOfLanes(Vec v) {
  float sum = 0.0f;
  for (float f : v.lane) sum += f;
  return sum;
}
inline Vec LoadF16(const void* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = F32FromF16(static_cast<const F16*>(p)[i]);
  return r;
}
inline Vec LoadBf16(const void* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = F32FromBf16(static_cast<const Bf16*>(p)[i]);
  return r;
}
inline Vec LoadInt8(const void* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = static_cast<const int8_t*>(p)[i];
  return r;
}
struct PairLine {
  const uint32_t* bits;
  Vec Even() const {
    Vec r;
    for (int i = 0; i < 16; ++i) r.lane[i] = F32FromBits(bits[i] << 16);
    return r;
  }
  Vec Odd() const {
    Vec r;
    for (int i = 0; i < 16; ++i) r.lane[i] = F32FromBits(bits[i] & 0xffff0000u);
    return r;
  }
};
inline PairLine LoadPairs(const void* p) { return {static_cast<const uint32_t*>(p)}; }

// 16 lanes of int32, used for sums.
struct IntVec {
  int32_t lane[16];
};
inline IntVec BroadcastInt(int32_t v) {
  IntVec r;
  for (int32_t& i : r.lane) i = v;
  return r;
}
inline Vec ToFloat(const IntVec& v) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = static_cast<float>(v.lane[i]);
  return r;
}
inline IntVec AddInt(IntVec a, const IntVec& b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline int32_t SumInt(const IntVec& v) {
  int32_t sum = 0;
  for (int32_t i : v.lane) sum += i;
  return sum;
}
// Rounds values below 2^22 in magnitude to the nearest integer, ties to even: adding 1.5 * 2^23
// leaves no fractional bits.
inline IntVec ToInt(Vec v) {
  IntVec r;
  for (int i = 0; i < 16; ++i) {
    r.lane[i] = static_cast<int32_t>(BitsFromF32(v.lane[i] + 12582912.0f) - 0x4b400000u);
  }
  return r;
}
// Stores 16 values in [-128, 127] as bytes.
inline void StoreBytes(int8_t* p, const IntVec& v) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v.lane[i]);
}
// One line of integer weights: four unsigned bytes for each of 16 outputs.
struct QuadLine {
  uint8_t byte[64];
};
inline QuadLine LoadQuads(const void* p) {
  QuadLine r;
  __builtin_memcpy(r.byte, p, 64);
  return r;
}
inline void StoreQuads(void* p, const QuadLine& v) { __builtin_memcpy(p, v.byte, 64); }
inline QuadLine LowNibbles(QuadLine v) {
  for (uint8_t& b : v.byte) b &= 15;
  return v;
}
inline QuadLine HighNibbles(QuadLine v) {
  for (uint8_t& b : v.byte) b = static_cast<uint8_t>(b >> 4);
  return v;
}
// Lines of 16-bit pairs, one for each output, of int4-k weights (kernel_table.h). A byte of at most
// 15 times a byte of at most 17 fits in a byte, so a 16-bit product multiplies two bytes by one
// factor.
inline QuadLine TimesPairs(const QuadLine& v, const QuadLine& factor) {
  uint16_t a[32], b[32];
  __builtin_memcpy(a, v.byte, 64);
  __builtin_memcpy(b, factor.byte, 64);
  for (int i = 0; i < 32; ++i) a[i] = static_cast<uint16_t>(uint32_t{a[i]} * b[i]);
  QuadLine r;
  __builtin_memcpy(r.byte, a, 64);
  return r;
}
// Returns a line whose pair i has the two elements pair(i, 0) and pair(i, 1).
template <typename Pair>
inline QuadLine MakePairs(const Pair& pair) {
  uint16_t element[32];
  for (int i = 0; i < 32; ++i) element[i] = static_cast<uint16_t>(pair(i / 2, i % 2));
  QuadLine r;
  __builtin_memcpy(r.byte, element, 64);
  return r;
}
// Returns the factor of subgroup 0 or 1, in both elements of the pair.
inline QuadLine FactorPairs(const char* p, int group) {
  return MakePairs([=](int i, int) { return static_cast<uint8_t>(p[2 * i + group]) & 15; });
}
// Returns the minimums of subgroups 0 and 1.
inline QuadLine MinimumPairs(const char* p) {
  return MakePairs([=](int i, int j) { return static_cast<uint8_t>(p[2 * i + j]) >> 4; });
}
// Loads 16 16-bit integers, each for both elements of a pair.
inline QuadLine UnitPairs(const char* p) {
  return MakePairs([=](int i, int) {
    uint16_t unit;
    __builtin_memcpy(&unit, p + 2 * i, 2);
    return unit;
  });
}
// Adds the products of pairs with the two 16-bit integers at `x`.
inline IntVec DotPairs(IntVec sum, const QuadLine& pairs, const char* x) {
  uint16_t element[32];
  int16_t two[2];
  __builtin_memcpy(element, pairs.byte, 64);
  __builtin_memcpy(two, x, 4);
  for (int i = 0; i < 32; ++i) sum.lane[i / 2] += element[i] * two[i % 2];
  return sum;
}
// Four signed input bytes, repeated for every output.
struct QuadInput {
  int8_t byte[4];
};
inline QuadInput BroadcastQuad(const char* p) {
  QuadInput r;
  __builtin_memcpy(r.byte, p, 4);
  return r;
}
inline IntVec DotQuads(IntVec sum, const QuadLine& w, const QuadInput& x) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 4; ++j) sum.lane[i] += w.byte[4 * i + j] * x.byte[j];
  }
  return sum;
}

inline uint64_t ReadStream(const char* data, int64_t bytes, int /*prefetch_level*/) {
  const uint64_t* p = reinterpret_cast<const uint64_t*>(data);
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (int64_t i = 0; i + 4 <= bytes / 8; i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
  }
  return a + b + c + d;
}

}  // namespace moeserve::cpu::MOESERVE_ISA

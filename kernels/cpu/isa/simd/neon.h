// A vector of 16 float lanes in four NEON registers. Only the isa_neon*.cc files include this file.
// MOESERVE_NEON_DOT: 0: no instruction adds products of bytes; 1: one adds products of signed bytes
// (FEAT_DotProd); 2: one adds products of unsigned and signed bytes, and one multiplies matrices of
// them (FEAT_I8MM). MOESERVE_BF16_DOT: the same for bf16 (FEAT_BF16).
#pragma once

#include <arm_neon.h>

#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu::MOESERVE_ISA {

struct Vec {
  float32x4_t q[4];
};
inline constexpr int kRowTile = 4;
inline constexpr int kQuantRowTile = 4;
inline constexpr int kPanelTile = 1;
inline constexpr int kAttentionRows = 4;
inline constexpr int kAttentionAccumulators = 4;

// Returns the vector of f(i) for the four registers.
template <typename F>
inline Vec Each(const F& f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vec Broadcast(float v) {
  const float32x4_t q = vdupq_n_f32(v);
  return {{q, q, q, q}};
}
inline Vec Zero() { return Broadcast(0.0f); }
inline Vec Load(const float* p) {
  return Each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void Store(float* p, const Vec& v) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.q[i]);
}
inline Vec Fma(const Vec& a, const Vec& b, const Vec& c) {
  return Each([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
}
inline Vec ContractFma(const Vec& a, const Vec& b, const Vec& c) { return Fma(a, b, c); }
inline Vec Mul(const Vec& a, const Vec& b) {
  return Each([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
}
inline Vec Abs(const Vec& v) {
  return Each([&](int i) { return vabsq_f32(v.q[i]); });
}
// Returns the larger value of each lane; if `a` is NaN, the value of `b`. (vmaxq_f32 would return
// NaN.)
inline Vec Max(const Vec& a, const Vec& b) {
  return Each([&](int i) { return vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); });
}
// Returns the smaller value of each lane; if `a` is NaN, the value of `b`.
inline Vec Min(const Vec& a, const Vec& b) {
  return Each([&](int i) { return vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); });
}
inline Vec Add(const Vec& a, const Vec& b) {
  return Each([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
}
inline Vec Sub(const Vec& a, const Vec& b) {
  return Each([&](int i) { return vsubq_f32(a.q[i], b.q[i]); });
}
inline Vec Div(const Vec& a, const Vec& b) {
  return Each([&](int i) { return vdivq_f32(a.q[i], b.q[i]); });
}
// Returns v, with 0 in the lanes in which a < b.
inline Vec ZeroWhereLess(const Vec& v, const Vec& a, const Vec& b) {
  return Each([&](int i) {
    return vreinterpretq_f32_u32(
        vbicq_u32(vreinterpretq_u32_f32(v.q[i]), vcltq_f32(a.q[i], b.q[i])));
  });
}
// Returns v * 2^n, where n is the integer in the lowest bits of `integer`.
inline Vec AddExponent(const Vec& v, const Vec& integer) {
  return Each([&](int i) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(integer.q[i]), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v.q[i]), n));
  });
}
#if !MOESERVE_BF16_DOT
inline uint16x4_t RoundToBf16(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
}
#else
inline uint16x4_t RoundToBf16(float32x4_t v) { return vreinterpret_u16_bf16(vcvt_bf16_f32(v)); }
#endif
// Rounds like Bf16FromF32().
inline void StoreBf16(Bf16* p, const Vec& v) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(reinterpret_cast<uint16_t*>(p) + 4 * i, RoundToBf16(v.q[i]));
  }
}
inline float MaxOfLanes(const Vec& v) {
  float lane[16];
  Store(lane, v);
  float m = lane[0];
  for (float f : lane) m = f > m ? f : m;
  return m;
}
inline float SumOfLanes(const Vec& v) {
  return vaddvq_f32(vaddq_f32(vaddq_f32(v.q[0], v.q[1]), vaddq_f32(v.q[2], v.q[3])));
}
inline Vec LoadF16(const void* p) {
  const auto* half = static_cast<const uint16_t*>(p);
  return Each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + 4 * i))); });
}
inline Vec LoadBf16(const void* p) {
  const auto* half = static_cast<const uint16_t*>(p);
  return Each(
      [=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(half + 4 * i), 16)); });
}
inline Vec LoadInt8(const void* p) {
  const int8x16_t v = vld1q_s8(static_cast<const int8_t*>(p));
  const int16x8_t lo = vmovl_s8(vget_low_s8(v)), hi = vmovl_s8(vget_high_s8(v));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))),
           vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
}
struct PairLine {
  const uint32_t* bits;
  Vec Even() const {
    return Each(
        [this](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(bits + 4 * i), 16)); });
  }
  Vec Odd() const {
    return Each([this](int i) {
      return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(bits + 4 * i), vdupq_n_u32(0xffff0000u)));
    });
  }
};
inline PairLine LoadPairs(const void* p) { return {static_cast<const uint32_t*>(p)}; }

// 16 lanes of int32, used for sums.
struct IntVec {
  int32x4_t q[4];
};
inline IntVec BroadcastInt(int32_t v) {
  const int32x4_t q = vdupq_n_s32(v);
  return {{q, q, q, q}};
}
inline Vec ToFloat(const IntVec& v) {
  return Each([&](int i) { return vcvtq_f32_s32(v.q[i]); });
}
inline IntVec AddInt(IntVec a, const IntVec& b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vaddq_s32(a.q[i], b.q[i]);
  return a;
}
inline int32_t SumInt(const IntVec& v) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(v.q[0], v.q[1]), vaddq_s32(v.q[2], v.q[3])));
}
// Rounds to the nearest integer, ties to even.
inline IntVec ToInt(const Vec& v) {
  IntVec r;
  for (int i = 0; i < 4; ++i) r.q[i] = vcvtnq_s32_f32(v.q[i]);
  return r;
}
// Stores 16 values in [-128, 127] as bytes.
inline void StoreBytes(int8_t* p, const IntVec& v) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(v.q[0]), vmovn_s32(v.q[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(v.q[2]), vmovn_s32(v.q[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
// One line of integer weights: four unsigned bytes for each of 16 outputs.
struct QuadLine {
  uint8x16_t q[4];
};
inline QuadLine LoadQuads(const void* p) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  return {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
}
inline void StoreQuads(void* p, const QuadLine& v) {
  for (int i = 0; i < 4; ++i) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, v.q[i]);
}
inline QuadLine LowNibbles(QuadLine v) {
  for (uint8x16_t& q : v.q) q = vandq_u8(q, vdupq_n_u8(15));
  return v;
}
inline QuadLine HighNibbles(QuadLine v) {
  for (uint8x16_t& q : v.q) q = vshrq_n_u8(q, 4);
  return v;
}
// Lines of 16-bit pairs, one for each output, of int4-k weights (kernel_table.h). A byte of at most
// 15 times a byte of at most 17 fits in a byte, so a 16-bit product multiplies two bytes by one
// factor.
inline QuadLine TimesPairs(QuadLine v, const QuadLine& factor) {
  for (int i = 0; i < 4; ++i) {
    v.q[i] = vreinterpretq_u8_u16(
        vmulq_u16(vreinterpretq_u16_u8(v.q[i]), vreinterpretq_u16_u8(factor.q[i])));
  }
  return v;
}
// Returns a line that has each of the 16 values for both elements of its output's pair.
inline QuadLine BothElements(uint16x8_t lo, uint16x8_t hi) {
  return {{vreinterpretq_u8_u16(vzip1q_u16(lo, lo)), vreinterpretq_u8_u16(vzip2q_u16(lo, lo)),
           vreinterpretq_u8_u16(vzip1q_u16(hi, hi)), vreinterpretq_u8_u16(vzip2q_u16(hi, hi))}};
}
// Returns the factor of subgroup 0 or 1, in both elements of the pair.
inline QuadLine FactorPairs(const char* p, int group) {
  const uint8x16x2_t groups = vld2q_u8(reinterpret_cast<const uint8_t*>(p));
  const uint8x16_t factor = vandq_u8(group == 0 ? groups.val[0] : groups.val[1], vdupq_n_u8(15));
  return BothElements(vmovl_u8(vget_low_u8(factor)), vmovl_u8(vget_high_u8(factor)));
}
// Returns the minimums of subgroups 0 and 1.
inline QuadLine MinimumPairs(const char* p) {
  QuadLine r;
  for (int i = 0; i < 4; ++i) {
    const uint8x8_t minimum = vshr_n_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p) + 8 * i), 4);
    r.q[i] = vreinterpretq_u8_u16(vmovl_u8(minimum));
  }
  return r;
}
// Loads 16 16-bit integers, each for both elements of a pair.
inline QuadLine UnitPairs(const char* p) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(p);
  return BothElements(vreinterpretq_u16_u8(vld1q_u8(bytes)),
                      vreinterpretq_u16_u8(vld1q_u8(bytes + 16)));
}
// Adds the products of pairs with the two 16-bit integers at `x`.
inline IntVec DotPairs(IntVec sum, const QuadLine& pairs, const char* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  const int16x8_t both = vreinterpretq_s16_s32(vdupq_n_s32(two));
  for (int i = 0; i < 4; ++i) {
    const int16x8_t pair = vreinterpretq_s16_u8(pairs.q[i]);
    const int32x4_t lo = vmull_s16(vget_low_s16(pair), vget_low_s16(both));
    const int32x4_t hi = vmull_s16(vget_high_s16(pair), vget_high_s16(both));
    sum.q[i] = vaddq_s32(sum.q[i], vpaddq_s32(lo, hi));
  }
  return sum;
}

// Four signed input bytes, repeated for every output.
#if MOESERVE_NEON_DOT == 2
struct QuadInput {
  int8x16_t bytes;
};
inline QuadInput BroadcastQuad(const char* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
}
inline IntVec DotQuads(IntVec sum, const QuadLine& w, const QuadInput& x) {
  for (int i = 0; i < 4; ++i) sum.q[i] = vusdotq_s32(sum.q[i], w.q[i], x.bytes);
  return sum;
}

// Sums of 16 outputs for each of two rows: q[j] has outputs 2 j and 2 j + 1, each for both rows.
struct IntMatrix {
  int32x4_t q[8];
};
inline IntMatrix BroadcastMatrix(int32_t first_row, int32_t second_row) {
  const int32x2_t rows = vset_lane_s32(second_row, vdup_n_s32(first_row), 1);
  IntMatrix r;
  for (int32x4_t& q : r.q) q = vcombine_s32(rows, rows);
  return r;
}
// Adds to each row what `first` and `second` have for it.
inline void AddRows(IntMatrix& sum, const IntVec& first, const IntVec& second) {
  for (int i = 0; i < 4; ++i) {
    sum.q[2 * i] = vaddq_s32(sum.q[2 * i], vzip1q_s32(first.q[i], second.q[i]));
    sum.q[2 * i + 1] = vaddq_s32(sum.q[2 * i + 1], vzip2q_s32(first.q[i], second.q[i]));
  }
}
inline IntVec SumsOfRow(const IntMatrix& sum, int row) {
  IntVec r;
  for (int i = 0; i < 4; ++i) {
    r.q[i] = row == 0 ? vuzp1q_s32(sum.q[2 * i], sum.q[2 * i + 1])
                      : vuzp2q_s32(sum.q[2 * i], sum.q[2 * i + 1]);
  }
  return r;
}
// Adds the products of two lines of weights, for eight values of k, with eight signed bytes of each
// of two rows.
inline void AddMatrix(IntMatrix& sum, const QuadLine& low, const QuadLine& high, const char* first,
                      const char* second) {
  const int8x16_t rows = vcombine_s8(vld1_s8(reinterpret_cast<const int8_t*>(first)),
                                     vld1_s8(reinterpret_cast<const int8_t*>(second)));
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t a = vreinterpretq_u32_u8(low.q[i]);
    const uint32x4_t b = vreinterpretq_u32_u8(high.q[i]);
    sum.q[2 * i] = vusmmlaq_s32(sum.q[2 * i], vreinterpretq_u8_u32(vzip1q_u32(a, b)), rows);
    sum.q[2 * i + 1] = vusmmlaq_s32(sum.q[2 * i + 1], vreinterpretq_u8_u32(vzip2q_u32(a, b)), rows);
  }
}
#elif MOESERVE_NEON_DOT == 1
// The weights are made signed by subtracting 128, and 128 times the sum of the four bytes is added.
struct QuadInput {
  int8x16_t bytes;
  int32x4_t shift;
};
inline QuadInput BroadcastQuad(const char* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const int8x16_t bytes = vreinterpretq_s8_s32(vdupq_n_s32(four));
  return {bytes, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), bytes, vdupq_n_s8(1)), 7)};
}
inline IntVec DotQuads(IntVec sum, const QuadLine& w, const QuadInput& x) {
  for (int i = 0; i < 4; ++i) {
    const int8x16_t weights = vreinterpretq_s8_u8(veorq_u8(w.q[i], vdupq_n_u8(128)));
    sum.q[i] = vdotq_s32(vaddq_s32(sum.q[i], x.shift), weights, x.bytes);
  }
  return sum;
}
#else
// Products of bytes are computed in 16 bits: 255 * 128 fits.
struct QuadInput {
  int16x8_t words;  // the four bytes, twice
};
inline QuadInput BroadcastQuad(const char* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return {vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))};
}
inline IntVec DotQuads(IntVec sum, const QuadLine& w, const QuadInput& x) {
  for (int i = 0; i < 4; ++i) {
    const int16x8_t lo = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(w.q[i])));
    const int16x8_t hi = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(w.q[i])));
    const int32x4_t first = vpaddlq_s16(vmulq_s16(lo, x.words));
    const int32x4_t second = vpaddlq_s16(vmulq_s16(hi, x.words));
    sum.q[i] = vaddq_s32(sum.q[i], vpaddq_s32(first, second));
  }
  return sum;
}
#endif

inline uint64_t ReadStream(const char* data, int64_t bytes, int prefetch_level) {
  uint64x2_t a = vdupq_n_u64(0), b = a;
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    const auto* p = reinterpret_cast<const uint64_t*>(data + i);
    if (prefetch_level == 1) {
      __builtin_prefetch(data + i + kPrefetchBytes, 0, 3);
    } else if (prefetch_level == 2) {
      __builtin_prefetch(data + i + kPrefetchBytes, 0, 2);
    }
    a = vaddq_u64(a, vaddq_u64(vld1q_u64(p), vld1q_u64(p + 2)));
    b = vaddq_u64(b, vaddq_u64(vld1q_u64(p + 4), vld1q_u64(p + 6)));
  }
  return vaddvq_u64(vaddq_u64(a, b));
}

}  // namespace moeserve::cpu::MOESERVE_ISA

#if MOESERVE_BF16_DOT
#include "kernels/cpu/isa/simd/neon_pairs.h"
#endif

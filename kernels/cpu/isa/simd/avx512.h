// A vector of 16 float lanes in one AVX-512 register. Only the isa_avx512*.cc files include this
// file.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu::MOESERVE_ISA {

using Vec = __m512;
inline constexpr int kRowTile = 6;
inline constexpr int kQuantRowTile = 6;
inline constexpr int kPanelTile = 4;  // panels that a tile of several rows covers at once
inline constexpr int kAttentionRows = 8;
inline constexpr int kAttentionAccumulators = 16;

inline Vec Zero() { return _mm512_setzero_ps(); }
inline Vec Broadcast(float v) { return _mm512_set1_ps(v); }
inline Vec Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec ContractFma(Vec a, Vec b, Vec c) { return Fma(a, b, c); }
inline Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec Abs(Vec v) { return _mm512_abs_ps(v); }
// Returns the larger value of each lane; if `a` is NaN, the value of `b`.
inline Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
// Returns the smaller value of each lane; if `a` is NaN, the value of `b`.
inline Vec Min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// Returns v, with 0 in the lanes in which a < b.
inline Vec ZeroWhereLess(Vec v, Vec a, Vec b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), v);
}
// Returns v * 2^n, where n is the integer in the lowest bits of `integer`.
inline Vec AddExponent(Vec v, Vec integer) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v),
                                              _mm512_slli_epi32(_mm512_castps_si512(integer), 23)));
}
// Rounds like Bf16FromF32(), except that subnormal numbers may become zero. This loses nothing,
// because the instruction for products of bf16 pairs treats subnormal numbers as zero as well.
inline void StoreBf16(Bf16* p, Vec v) {
#if MOESERVE_BF16_DOT
  const __m256bh rounded = _mm512_cvtneps_pbh(v);
  __builtin_memcpy(p, &rounded, sizeof(rounded));
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits,
                                 _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
inline float MaxOfLanes(Vec v) { return _mm512_reduce_max_ps(v); }
inline float SumOfLanes(Vec v) { return _mm512_reduce_add_ps(v); }
inline Vec LoadF16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
// Loads 16 adjacent bf16 values.
inline Vec LoadBf16(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// Loads 16 adjacent signed bytes.
inline Vec LoadInt8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// One line of bf16 weights: 16 pairs (even k, odd k).
struct PairLine {
  __m512i bits;
  Vec Even() const { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
  Vec Odd() const {
    return _mm512_castsi512_ps(
        _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};
inline PairLine LoadPairs(const void* p) { return {_mm512_loadu_si512(p)}; }

// 16 lanes of int32, used for sums.
using IntVec = __m512i;
inline IntVec BroadcastInt(int32_t v) { return _mm512_set1_epi32(v); }
inline Vec ToFloat(IntVec v) { return _mm512_cvtepi32_ps(v); }
inline IntVec AddInt(IntVec a, IntVec b) { return _mm512_add_epi32(a, b); }
inline int32_t SumInt(IntVec v) { return _mm512_reduce_add_epi32(v); }
// Rounds to the nearest integer, ties to even.
inline IntVec ToInt(Vec v) { return _mm512_cvtps_epi32(v); }
// Stores 16 values in [-128, 127] as bytes.
inline void StoreBytes(int8_t* p, IntVec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
// One line of integer weights: four unsigned bytes for each of 16 outputs.
using QuadLine = __m512i;
inline QuadLine LoadQuads(const void* p) { return _mm512_loadu_si512(p); }
inline void StoreQuads(void* p, QuadLine v) { _mm512_storeu_si512(p, v); }
inline QuadLine LowNibbles(QuadLine v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline QuadLine HighNibbles(QuadLine v) {
  return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}
// Lines of 16-bit pairs, one for each output, of int4-k weights (kernel_table.h). A byte of at most
// 15 times a byte of at most 17 fits in a byte, so a 16-bit product multiplies two bytes by one
// factor.
inline QuadLine TimesPairs(QuadLine v, QuadLine factor) { return _mm512_mullo_epi16(v, factor); }
// Loads kFactorBytes: the bytes of an output are its low two.
inline QuadLine LoadFactors(const char* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Returns the factor of subgroup 0 or 1, in both elements of the pair.
inline QuadLine FactorPairs(const char* p, int group) {
  const __m512i to_both = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, -1, 0, -1, 4, -1, 4, -1, 8, -1, 8, -1, 12, -1, 12, -1));
  const __m512i v = _mm512_srli_epi32(LoadFactors(p), group * 8);
  return _mm512_shuffle_epi8(_mm512_and_si512(v, _mm512_set1_epi8(15)), to_both);
}
// Returns the factor of subgroup 0 or 1 as int32.
inline IntVec FactorInts(const char* p, int group) {
  return _mm512_and_si512(_mm512_srli_epi32(LoadFactors(p), group * 8), _mm512_set1_epi32(15));
}
// Returns sum + part * factor.
inline IntVec AddScaledInt(IntVec sum, IntVec part, IntVec factor) {
  return _mm512_add_epi32(sum, _mm512_mullo_epi32(part, factor));
}
// Returns the minimums of subgroups 0 and 1.
inline QuadLine MinimumPairs(const char* p) {
  const __m512i apart = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
  return _mm512_shuffle_epi8(HighNibbles(LoadFactors(p)), apart);
}
// Loads 16 16-bit integers, each for both elements of a pair.
inline QuadLine UnitPairs(const char* p) {
  const __m512i v = LoadFactors(p);
  return _mm512_or_si512(v, _mm512_slli_epi32(v, 16));
}
// Adds the products of pairs with the two 16-bit integers at `x`.
inline IntVec DotPairs(IntVec sum, QuadLine pairs, const char* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  const __m512i both = _mm512_set1_epi32(two);
#ifdef __AVX512VNNI__
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(both));  // as in DotQuads()
  return sum;
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, both));
#endif
}
// Four signed input bytes, repeated for every output.
#ifdef __AVX512VNNI__
using QuadInput = __m512i;
inline QuadInput BroadcastQuad(const char* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
inline IntVec DotQuads(IntVec sum, QuadLine w, const QuadInput& x) {
  // Inline assembly instead of the intrinsic, because g++ 12 copies the sum to another register
  // before each use of the intrinsic.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}
using AliasedInt32 [[gnu::may_alias, gnu::aligned(1)]] = int32_t;
// Adds the products of four lines with the same four input bytes. One asm statement, so that the
// compiler has the lines in registers before the first product.
[[gnu::always_inline]] inline void DotFour(IntVec (&sum)[4], const QuadLine (&w)[4],
                                           const char* x) {
  QuadInput input;
  asm("vpbroadcastd %[x], %[input]\n\t"
      "vpdpbusd %[input], %[w0], %[s0]\n\t"
      "vpdpbusd %[input], %[w1], %[s1]\n\t"
      "vpdpbusd %[input], %[w2], %[s2]\n\t"
      "vpdpbusd %[input], %[w3], %[s3]"
      : [s0] "+v"(sum[0]), [s1] "+v"(sum[1]), [s2] "+v"(sum[2]), [s3] "+v"(sum[3]),
        [input] "=&v"(input)
      : [w0] "v"(w[0]), [w1] "v"(w[1]), [w2] "v"(w[2]), [w3] "v"(w[3]),
        [x] "m"(*reinterpret_cast<const AliasedInt32*>(x)));
}
#else
// Widened to 16 bits as the pairs (0, 2) and (1, 3), because the instruction that multiplies bytes
// (vpmaddubsw) saturates.
struct QuadInput {
  __m512i even, odd;
};
inline QuadInput BroadcastQuad(const char* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m512i v = _mm512_set1_epi32(four);
  return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), _mm512_srai_epi16(v, 8)};
}
inline IntVec DotQuads(IntVec sum, QuadLine w, const QuadInput& x) {
  const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(255));
  const __m512i odd = _mm512_srli_epi16(w, 8);
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, x.even));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, x.odd));
}
#endif

inline uint64_t ReadStream(const char* data, int64_t bytes, int prefetch_level) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    for (int line = 0; line < 256; line += 64) {
      if (prefetch_level == 1) {
        _mm_prefetch(data + i + kPrefetchBytes + line, _MM_HINT_T0);
      } else if (prefetch_level == 2) {
        _mm_prefetch(data + i + kPrefetchBytes + line, _MM_HINT_T1);
      }
    }
    a = _mm512_add_epi64(a, _mm512_load_si512(data + i));
    b = _mm512_add_epi64(b, _mm512_load_si512(data + i + 64));
    c = _mm512_add_epi64(c, _mm512_load_si512(data + i + 128));
    d = _mm512_add_epi64(d, _mm512_load_si512(data + i + 192));
  }
  return static_cast<uint64_t>(
      _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d))));
}

}  // namespace moeserve::cpu::MOESERVE_ISA

#if MOESERVE_BF16_DOT
#include "kernels/cpu/isa/simd/avx512_pairs.h"
#endif

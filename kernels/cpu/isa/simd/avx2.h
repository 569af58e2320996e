// A vector of 16 float lanes in two AVX2 registers. Only isa_avx2.cc includes this file.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu::MOESERVE_ISA {

struct Vec {
  __m256 lo, hi;
};
inline constexpr int kRowTile = 6;
inline constexpr int kQuantRowTile = 6;
inline constexpr int kPanelTile = 1;
inline constexpr int kAttentionRows = 6;
inline constexpr int kAttentionAccumulators = 4;

inline Vec Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec Broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline Vec Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void Store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline Vec Fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec ContractFma(Vec a, Vec b, Vec c) { return Fma(a, b, c); }
inline Vec Mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec Abs(Vec v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.lo), _mm256_andnot_ps(sign, v.hi)};
}
// Returns the larger value of each lane; if `a` is NaN, the value of `b`.
inline Vec Max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
// Returns the smaller value of each lane; if `a` is NaN, the value of `b`.
inline Vec Min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec Add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec Sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec Div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// Returns v, with 0 in the lanes in which a < b.
inline Vec ZeroWhereLess(Vec v, Vec a, Vec b) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), v.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ), v.hi)};
}
inline __m256 AddExponent(__m256 v, __m256 integer) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v),
                                              _mm256_slli_epi32(_mm256_castps_si256(integer), 23)));
}
// Returns v * 2^n, where n is the integer in the lowest bits of `integer`.
inline Vec AddExponent(Vec v, Vec integer) {
  return {AddExponent(v.lo, integer.lo), AddExponent(v.hi, integer.hi)};
}
inline __m256i RoundToBf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i chosen =
      _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  return _mm256_srli_epi32(chosen, 16);
}
// Rounds like Bf16FromF32().
inline void StoreBf16(Bf16* p, Vec v) {
  const __m256i words = _mm256_packus_epi32(RoundToBf16(v.lo), RoundToBf16(v.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
inline float MaxOfLanes(Vec v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
inline float SumOfLanes(Vec v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline Vec LoadF16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline __m256 WidenBf16(__m128i v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
inline Vec LoadBf16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {WidenBf16(_mm_loadu_si128(q)), WidenBf16(_mm_loadu_si128(q + 1))};
}
inline __m256 WidenInt8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)); }
inline Vec LoadInt8(const void* p) {
  const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {WidenInt8(v), WidenInt8(_mm_srli_si128(v, 8))};
}
// Returns v with kMask applied to each 32 bits. The mask stays in memory, because tiles of 6 rows
// need all registers.
template <uint32_t kMask>
inline __m256i Masked(__m256i v) {
  alignas(32) static constexpr uint32_t kMasks[8] = {kMask, kMask, kMask, kMask,
                                                     kMask, kMask, kMask, kMask};
  asm("vpand %1, %0, %0" : "+x"(v) : "m"(*reinterpret_cast<const __m256i*>(kMasks)));
  return v;
}
class PairLine {
 public:
  PairLine(__m256i low, __m256i high) : lo(low), hi(high) {}
  Vec Even() const {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  }
  Vec Odd() const { return {HighHalf(lo), HighHalf(hi)}; }

 private:
  static __m256 HighHalf(__m256i v) { return _mm256_castsi256_ps(Masked<0xffff0000u>(v)); }
  __m256i lo, hi;
};
inline PairLine LoadPairs(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}

// 16 lanes of int32, used for sums.
struct IntVec {
  __m256i lo, hi;
};
inline IntVec BroadcastInt(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline Vec ToFloat(IntVec v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
inline IntVec AddInt(IntVec a, IntVec b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline int32_t SumInt(IntVec v) {
  const __m256i eight = _mm256_add_epi32(v.lo, v.hi);
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
// Rounds to the nearest integer, ties to even.
inline IntVec ToInt(Vec v) { return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)}; }
// Stores 16 values in [-128, 127] as bytes.
inline void StoreBytes(int8_t* p, IntVec v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
// One line of integer weights: four unsigned bytes for each of 16 outputs.
struct QuadLine {
  __m256i lo, hi;
};
inline QuadLine LoadQuads(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void StoreQuads(void* p, QuadLine v) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, v.lo);
  _mm256_storeu_si256(q + 1, v.hi);
}
inline QuadLine LowNibbles(QuadLine v) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(v.lo, mask), _mm256_and_si256(v.hi, mask)};
}
inline QuadLine HighNibbles(QuadLine v) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(v.lo, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(v.hi, 4), mask)};
}
// Lines of 16-bit pairs, one for each output, of int4-k weights (kernel_table.h). A byte of at most
// 15 times a byte of at most 17 fits in a byte, so a 16-bit product multiplies two bytes by one
// factor.
inline QuadLine TimesPairs(QuadLine v, QuadLine factor) {
  return {_mm256_mullo_epi16(v.lo, factor.lo), _mm256_mullo_epi16(v.hi, factor.hi)};
}
// Loads kFactorBytes: the bytes of an output are its low two.
inline QuadLine LoadFactors(const char* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
inline QuadLine ShufflePairs(QuadLine v, __m128i order) {
  const __m256i both = _mm256_broadcastsi128_si256(order);
  return {_mm256_shuffle_epi8(v.lo, both), _mm256_shuffle_epi8(v.hi, both)};
}
// Returns the factor of subgroup 0 or 1, in both elements of the pair.
inline QuadLine FactorPairs(const char* p, int group) {
  const char g = static_cast<char>(group);
  const __m128i to_both = _mm_setr_epi8(g, -1, g, -1, 4 + g, -1, 4 + g, -1, 8 + g, -1, 8 + g, -1,
                                        12 + g, -1, 12 + g, -1);
  return ShufflePairs(LowNibbles(LoadFactors(p)), to_both);
}
// Returns the minimums of subgroups 0 and 1.
inline QuadLine MinimumPairs(const char* p) {
  return ShufflePairs(HighNibbles(LoadFactors(p)),
                      _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
}
// Loads 16 16-bit integers, each for both elements of a pair.
inline QuadLine UnitPairs(const char* p) {
  const QuadLine v = LoadFactors(p);
  return {_mm256_or_si256(v.lo, _mm256_slli_epi32(v.lo, 16)),
          _mm256_or_si256(v.hi, _mm256_slli_epi32(v.hi, 16))};
}
// Adds the products of pairs with the two 16-bit integers at `x`.
[[gnu::always_inline]] inline IntVec DotPairs(IntVec sum, QuadLine pairs, const char* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  const __m256i both = _mm256_set1_epi32(two);
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(pairs.lo, both)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(pairs.hi, both))};
}
// Four signed input bytes, repeated for every output. They are widened to 16 bits as the pairs (0,
// 2) and (1, 3), because the instruction that multiplies bytes (vpmaddubsw) saturates.
struct QuadInput {
  __m256i even, odd;
};
inline QuadInput BroadcastQuad(const char* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m256i v = _mm256_set1_epi32(four);
  return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}
inline __m256i DotQuads(__m256i sum, __m256i w, const QuadInput& x) {
  const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255));
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x.even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), x.odd));
}
inline IntVec DotQuads(IntVec sum, QuadLine w, const QuadInput& x) {
  return {DotQuads(sum.lo, w.lo, x), DotQuads(sum.hi, w.hi, x)};
}

// Tiles of several rows take int8 inputs widened to 16 bits. To widen them in the tile would take a
// quarter of the instructions for each row. Four values of k are two pairs, (0, 2) and (1, 3).
#define MOESERVE_WIDE_INPUTS
// Widens 16 values.
inline void StoreWideQuads(const char* values, char* out) {
  const __m256i wide =
      _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(wide, order));
}
// Load the weights of such pairs from a line.
[[gnu::always_inline]] inline QuadLine EvenBytes(const char* line) {
  const QuadLine v = LoadQuads(line);
  return {Masked<0x00ff00ffu>(v.lo), Masked<0x00ff00ffu>(v.hi)};
}
[[gnu::always_inline]] inline QuadLine OddBytes(const char* line) {
  const QuadLine v = LoadQuads(line);
  return {_mm256_srli_epi16(v.lo, 8), _mm256_srli_epi16(v.hi, 8)};
}
[[gnu::always_inline]] inline QuadLine LowNibblesAt(const char* line) {
  const QuadLine v = LoadQuads(line);
  return {Masked<0x0f0f0f0fu>(v.lo), Masked<0x0f0f0f0fu>(v.hi)};
}
[[gnu::always_inline]] inline QuadLine HighNibblesAt(const char* line) {
  const QuadLine v = LoadQuads(line);
  return {Masked<0x0f0f0f0fu>(_mm256_srli_epi16(v.lo, 4)),
          Masked<0x0f0f0f0fu>(_mm256_srli_epi16(v.hi, 4))};
}

// Sums of products of 4-bit weights and input bytes in 16 bits. The sum of 8 products of pairs,
// each at most 2 * 15 * 127, fits. This takes half of the instructions of DotQuads().
#define MOESERVE_PAIR_SUMS
struct PairSums {
  __m256i lo, hi;
};
inline PairSums ZeroPairSums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
[[gnu::always_inline]] inline PairSums DotNibbles(PairSums sum, QuadLine w, const char* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const __m256i input = _mm256_set1_epi32(four);
  return {_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, input)),
          _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, input))};
}
inline QuadLine UnitFactors() { return {_mm256_set1_epi16(1), _mm256_set1_epi16(1)}; }
// Adds the sums times factors, which are 16-bit integers for each pair.
[[gnu::always_inline]] inline IntVec AddPairSums(IntVec sum, PairSums pairs, QuadLine factor) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(pairs.lo, factor.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(pairs.hi, factor.hi))};
}

inline uint64_t ReadStream(const char* data, int64_t bytes, int prefetch_level) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    if (prefetch_level == 1) {
      _mm_prefetch(data + i + kPrefetchBytes, _MM_HINT_T0);
    } else if (prefetch_level == 2) {
      _mm_prefetch(data + i + kPrefetchBytes, _MM_HINT_T1);
    }
    a = _mm256_add_epi64(a, _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i)));
    b = _mm256_add_epi64(b, _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32)));
  }
  alignas(32) uint64_t s[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(s), _mm256_add_epi64(a, b));
  return s[0] + s[1] + s[2] + s[3];
}

}  // namespace moeserve::cpu::MOESERVE_ISA

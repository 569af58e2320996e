// 16 float lanes in two AVX2 registers. Included by isa_avx2.cc alone.
#pragma once

#include <immintrin.h>

namespace moeserve::cpu::MOESERVE_ISA {

struct Vec {
  __m256 lo, hi;
};
inline constexpr int kRowTile = 4;
inline constexpr int kPanelTile = 1;
inline constexpr int kAttentionRows = 4;
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
struct PairLine {
  __m256i lo, hi;
  Vec Even() const {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  }
  Vec Odd() const {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)),
            _mm256_castsi256_ps(_mm256_and_si256(hi, mask))};
  }
};
inline PairLine LoadPairs(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}

inline uint64_t ReadStream(const char* data, int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    _mm_prefetch(data + i + 4096, _MM_HINT_T0);
    a = _mm256_add_epi64(a, _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i)));
    b = _mm256_add_epi64(b, _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32)));
  }
  alignas(32) uint64_t s[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(s), _mm256_add_epi64(a, b));
  return s[0] + s[1] + s[2] + s[3];
}

}  // namespace moeserve::cpu::MOESERVE_ISA

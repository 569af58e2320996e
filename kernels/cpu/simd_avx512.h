// 16 float lanes in one AVX-512 register. Included by the isa_avx512*.cc files alone.
#pragma once

#include <immintrin.h>

namespace moeserve::cpu::MOESERVE_ISA {

using Vec = __m512;
inline constexpr int kRowTile = 6;
inline constexpr int kPanelTile = 4;  // panels of a block that one tile covers
inline constexpr int kAttentionRows = 8;
inline constexpr int kAttentionAccumulators = 16;

inline Vec Zero() { return _mm512_setzero_ps(); }
inline Vec Broadcast(float v) { return _mm512_set1_ps(v); }
inline Vec Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec LoadF16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
// 16 adjacent bf16 values.
inline Vec LoadBf16(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// 16 adjacent signed bytes.
inline Vec LoadInt8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// A line of 16 (even k, odd k) bf16 pairs.
struct PairLine {
  __m512i bits;
  Vec Even() const { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
  Vec Odd() const {
    return _mm512_castsi512_ps(
        _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};
inline PairLine LoadPairs(const void* p) { return {_mm512_loadu_si512(p)}; }

inline uint64_t ReadStream(const char* data, int64_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    _mm_prefetch(data + i + 4096, _MM_HINT_T0);
    _mm_prefetch(data + i + 4096 + 64, _MM_HINT_T0);
    _mm_prefetch(data + i + 4096 + 128, _MM_HINT_T0);
    _mm_prefetch(data + i + 4096 + 192, _MM_HINT_T0);
    a = _mm512_add_epi64(a, _mm512_load_si512(data + i));
    b = _mm512_add_epi64(b, _mm512_load_si512(data + i + 64));
    c = _mm512_add_epi64(c, _mm512_load_si512(data + i + 128));
    d = _mm512_add_epi64(d, _mm512_load_si512(data + i + 192));
  }
  return static_cast<uint64_t>(
      _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d))));
}

}  // namespace moeserve::cpu::MOESERVE_ISA

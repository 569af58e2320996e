// Writes the keys of a whole block of the KV cache at once.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

#if defined(__AVX512F__)
// Transposes 16 rows of 16 values.
inline void Transpose(__m512 (&row)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
  }
  // b[i + c] has column c + 4 * l of rows i..i + 3 in its lane l of 128 bits.
  for (int i = 0; i < 16; i += 4) {
    const __m512d low0 = _mm512_castps_pd(a[i]), high0 = _mm512_castps_pd(a[i + 1]);
    const __m512d low2 = _mm512_castps_pd(a[i + 2]), high2 = _mm512_castps_pd(a[i + 3]);
    b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low0, low2));
    b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low0, low2));
    b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high0, high2));
    b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high0, high2));
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // lanes 0 and 2, or 1 and 3, of both operands
  for (int c = 0; c < 4; ++c) {
    const __m512 even0 = _mm512_shuffle_f32x4(b[c], b[4 + c], kEven);
    const __m512 even8 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], kEven);
    const __m512 odd0 = _mm512_shuffle_f32x4(b[c], b[4 + c], kOdd);
    const __m512 odd8 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], kOdd);
    row[c] = _mm512_shuffle_f32x4(even0, even8, kEven);
    row[4 + c] = _mm512_shuffle_f32x4(odd0, odd8, kEven);
    row[8 + c] = _mm512_shuffle_f32x4(even0, even8, kOdd);
    row[12 + c] = _mm512_shuffle_f32x4(odd0, odd8, kOdd);
  }
}
#endif

// Rounds 16 rows of n values as ConvertRow() does, and stores element i of row r at out[16 i + r].
void InterleaveBf16(const float* const* rows, int64_t n, Bf16* out) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    __m512 row[16];
    for (int r = 0; r < 16; ++r) row[r] = _mm512_loadu_ps(rows[r] + i);
    Transpose(row);
    for (int c = 0; c < 16; ++c) StoreBf16(out + (i + c) * 16, row[c]);
  }
#endif
  for (; i < n; ++i) {
    for (int r = 0; r < 16; ++r) out[i * 16 + r] = Bf16FromF32(rows[r][i]);
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA

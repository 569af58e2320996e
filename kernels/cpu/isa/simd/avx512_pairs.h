// Vectors of 16 pairs of bf16 in one AVX-512 register. avx512.h includes this file for the
// instruction set with products of bf16.
#pragma once

namespace moeserve::cpu::MOESERVE_ISA {

using PairVec = __m512i;

inline PairVec LoadPairVec(const void* p) { return _mm512_loadu_si512(p); }

// Adds the products of pairs with one pair of bf16.
inline Vec AddPairs(Vec sum, PairVec pairs, int32_t pair) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}

// Returns the order of a permutation that places element i before element i + distance.
inline __m512i PairOrder(int distance) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(
      lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(distance)), 16));
}

// Returns the pairs of a line of 16 elements and the line behind it.
inline PairVec PairsOfLines(__m512i lines) {
  return _mm512_permutexvar_epi16(PairOrder(16), lines);
}
inline PairVec LoadLinePairs(const void* p) { return PairsOfLines(_mm512_loadu_si512(p)); }

// Returns the pairs of a line and zeros.
inline PairVec LoadLastLine(const void* p) {
  return PairsOfLines(_mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
}

// Loads V vectors of pairs of the elements of two rows. A row that is not there counts as zeros and
// is not read.
template <int V>
inline void LoadRowPairs(const char* even, const char* odd, bool has_even, bool has_odd,
                         PairVec (&pairs)[V]) {
  static_assert(V == 1 || V % 2 == 0);
  if constexpr (V == 1) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i first =
        has_even ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)) : none;
    const __m256i second =
        has_odd ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)) : none;
    pairs[0] = PairsOfLines(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
  } else {
    const __m512i low = PairOrder(32);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int v = 0; v < V; v += 2) {
      const __m512i none = _mm512_setzero_si512();
      const __m512i first = has_even ? _mm512_loadu_si512(even + v * 32) : none;
      const __m512i second = has_odd ? _mm512_loadu_si512(odd + v * 32) : none;
      pairs[v] = _mm512_permutex2var_epi16(first, low, second);
      pairs[v + 1] = _mm512_permutex2var_epi16(first, high, second);
    }
  }
}

}  // namespace moeserve::cpu::MOESERVE_ISA

// Vectors of 16 pairs of bf16 in four NEON registers, and their products (FEAT_BF16). neon.h
// includes this file for the instruction set with products of bf16.
#pragma once

namespace moeserve::cpu::MOESERVE_ISA {

struct PairVec {
  uint16x8_t q[4];
};

inline PairVec LoadPairVec(const void* p) {
  const auto* element = static_cast<const uint16_t*>(p);
  return {{vld1q_u16(element), vld1q_u16(element + 8), vld1q_u16(element + 16),
           vld1q_u16(element + 24)}};
}

// Adds the products of pairs with one pair of bf16.
inline Vec AddPairs(const Vec& sum, const PairVec& pairs, int32_t pair) {
  const bfloat16x8_t both = vreinterpretq_bf16_s32(vdupq_n_s32(pair));
  return Each(
      [&](int i) { return vbfdotq_f32(sum.q[i], vreinterpretq_bf16_u16(pairs.q[i]), both); });
}

// Returns the pairs of two lines of 16 elements. A line that is not there counts as zeros and is
// not read.
inline PairVec PairsOfLines(const void* even, const void* odd, bool has_even, bool has_odd) {
  PairVec r;
  for (int i = 0; i < 2; ++i) {
    const uint16x8_t none = vdupq_n_u16(0);
    const uint16x8_t a = has_even ? vld1q_u16(static_cast<const uint16_t*>(even) + 8 * i) : none;
    const uint16x8_t b = has_odd ? vld1q_u16(static_cast<const uint16_t*>(odd) + 8 * i) : none;
    r.q[2 * i] = vzip1q_u16(a, b);
    r.q[2 * i + 1] = vzip2q_u16(a, b);
  }
  return r;
}

// Returns the pairs of a line and the line behind it.
inline PairVec LoadLinePairs(const char* p) { return PairsOfLines(p, p + 32, true, true); }

// Returns the pairs of a line and zeros.
inline PairVec LoadLastLine(const char* p) { return PairsOfLines(p, p, true, false); }

// Loads V vectors of pairs of the elements of two rows. A row that is not there counts as zeros and
// is not read.
template <int V>
inline void LoadRowPairs(const char* even, const char* odd, bool has_even, bool has_odd,
                         PairVec (&pairs)[V]) {
  for (int v = 0; v < V; ++v) {
    pairs[v] = PairsOfLines(even + v * 32, odd + v * 32, has_even, has_odd);
  }
}

// Sums of 16 outputs for each of two rows: q[j] has outputs 2 j and 2 j + 1, each for both rows.
struct MatrixSums {
  float32x4_t q[8];
};

// Two rows of four elements of the inputs.
inline bfloat16x8_t JoinRows(uint16x4_t first, uint16x4_t second) {
  return vreinterpretq_bf16_u16(vcombine_u16(first, second));
}

// Adds the products of two lines of weights, for four values of k, with two rows of inputs. The
// instruction rounds as two of AddPairs(), one after the other.
inline void AddMatrix(MatrixSums& sum, const PairVec& first, const PairVec& second,
                      bfloat16x8_t rows) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t a = vreinterpretq_u32_u16(first.q[i]);
    const uint32x4_t b = vreinterpretq_u32_u16(second.q[i]);
    sum.q[2 * i] = vbfmmlaq_f32(sum.q[2 * i], vreinterpretq_bf16_u32(vzip1q_u32(a, b)), rows);
    sum.q[2 * i + 1] =
        vbfmmlaq_f32(sum.q[2 * i + 1], vreinterpretq_bf16_u32(vzip2q_u32(a, b)), rows);
  }
}

// Returns the sums of one of the rows.
inline Vec SumsOfRow(const MatrixSums& sum, int row) {
  return Each([&](int i) {
    return row == 0 ? vuzp1q_f32(sum.q[2 * i], sum.q[2 * i + 1])
                    : vuzp2q_f32(sum.q[2 * i], sum.q[2 * i + 1]);
  });
}

}  // namespace moeserve::cpu::MOESERVE_ISA

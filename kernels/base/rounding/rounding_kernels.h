// The loops that round weights to integers, compiled for several instruction sets. All of them
// compute the same bits: nothing is contracted, and the order of all sums is written out.
#pragma once

#include <cstdint>

namespace moeserve::rounding {

inline constexpr int kMinLanes = 8, kMaxLanes = 16;

// The lines step * q + low, q = 0..15, of subgroups of int4-k weights; step >= 0 and low <= 0.
struct SubGroupLines {
  float step[kMaxLanes];
  float low[kMaxLanes];
};

// Functions of several groups take up to `lanes` groups of kSubGroup weights that follow each other
// in a row; n is the number of weights, and only the last group may have fewer than kSubGroup.
struct RoundingKernels {
  const char* name;
  int lanes;
  // Returns the largest magnitude of n numbers; infinity or NaN if one of them is not finite.
  float (*largest_magnitude)(const float* w, int n);
  // Computes values[i] = w[i] * inverse, clamped to [low, high] and rounded, halves away from zero.
  void (*round_values)(const float* w, int n, float inverse, float low, float high, int8_t* values);
  // Computes the scales [lanes] of int4 groups.
  void (*fit_scales)(const float* w, int n, float* scales);
  // Computes the lines of subgroups.
  void (*fit_lines)(const float* w, int n, SubGroupLines* lines);
  // Rounds the lines to factors near them, if d and u are given (QuantizedMatrix), and the weights
  // to levels of the rounded lines. Stores a value for each weight and a factor for each subgroup.
  void (*round_lines)(const float* w, int n, const SubGroupLines& lines, float d, float u,
                      int8_t* values, int8_t* factors);
};

extern const RoundingKernels kPlainKernels;
#if defined(__x86_64__)
extern const RoundingKernels kAvx2Kernels;
extern const RoundingKernels kAvx512Kernels;
#endif

}  // namespace moeserve::rounding

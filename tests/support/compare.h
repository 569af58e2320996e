// Compares results with expected values. A failure reports the element whose difference exceeds its
// tolerance by the largest factor.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/backend.h"

namespace moeserve::testing {

// Returns the largest relative error of rounding to type `t`.
inline double Epsilon(DType t) { return t == DType::kF32 ? 0x1p-24 : 0x1p-8; }

// Succeeds if |actual - expected| <= tolerance * (|expected| + magnitude) for all elements, where
// magnitude is the root mean square of the expected row. NaN never passes.
inline ::testing::AssertionResult RowNear(const std::vector<double>& actual,
                                          const std::vector<double>& expected, double tolerance) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << actual.size() << " values, not " << expected.size();
  }
  double square = 0.0;
  for (double v : expected) square += v * v;
  const double magnitude = std::sqrt(square / static_cast<double>(expected.size()));
  size_t worst = 0;
  double worst_ratio = -1.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double bound = tolerance * (std::abs(expected[i]) + magnitude) + 1e-30;
    const double ratio = std::abs(actual[i] - expected[i]) / bound;
    if (!(ratio <= worst_ratio)) {
      worst_ratio = ratio;
      worst = i;
    }
  }
  if (worst_ratio <= 1.0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "element " << worst << ": " << actual[worst] << " instead of " << expected[worst]
         << ", " << worst_ratio << " times the tolerance";
}

// Returns row r of a view, widened to double. The host must be able to read the memory, as with the
// emulated device.
inline std::vector<double> RowOf(const RowsView& v, int64_t r, int64_t cols) {
  std::vector<double> row;
  for (int64_t i = 0; i < cols; ++i) {
    if (v.dtype == DType::kF32) {
      row.push_back(reinterpret_cast<const float*>(v.row(r))[i]);
    } else {
      row.push_back(F32FromBf16(reinterpret_cast<const Bf16*>(v.row(r))[i]));
    }
  }
  return row;
}

}  // namespace moeserve::testing

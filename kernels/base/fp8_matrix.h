// A matrix of 8-bit floats with scales, as checkpoint loaders pass it to backends.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace moeserve {

// So many adjacent columns of a row have one scale.
inline constexpr int kFp8ScaleInputs = 128;

// Element (r, c) is values[r * row_stride + c], a number of OCP's E4M3, times
// scales[r * groups() + c / kFp8ScaleInputs].
struct Fp8Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* values = nullptr;
  int64_t row_stride = 0;  // bytes, at least `columns`
  std::vector<float> scales;
  std::shared_ptr<const void> owner;  // keeps `values` alive

  int64_t groups() const { return (columns + kFp8ScaleInputs - 1) / kFp8ScaleInputs; }
};

}  // namespace moeserve

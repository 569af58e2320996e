// Weights as small integers: each group of adjacent columns of a row shares one scale.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"

namespace moeserve::rounding {
struct RoundingKernels;
}

namespace moeserve {

// Returns the integer of one column of a packed row.
constexpr int UnpackedValue(Quantization type, const uint8_t* bytes, int64_t column) {
  const auto nibble = [&] {
    return column % 2 == 0 ? bytes[column / 2] & 15 : bytes[column / 2] >> 4;
  };
  switch (type) {
    case Quantization::kNone:
      break;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      return static_cast<int8_t>(bytes[column]);
    case Quantization::kInt4:
      return nibble() < 8 ? nibble() : nibble() - 16;
    case Quantization::kInt4K:
      return nibble();
  }
  return 0;
}

// A quantized matrix [rows, columns], row-major. Element (r, c) is value(r, c) * the scale of its
// group. In int4-k, a group has two scales, d and u, and each 32 columns of it have a byte s + 16 m
// of unsigned 4-bit factors; the element is d * (s * value(r, c) - u * m), where u is an integer in
// [0, kMaxMinimumUnit], so that every product fits in 8 bits. `owner` keeps both arrays alive.
struct QuantizedMatrix {
  Quantization type = Quantization::kInt8;
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* values = nullptr;  // [rows, QuantRowBytes]
  const F16* scales = nullptr;      // [rows, QuantScales], 2-byte aligned
  std::shared_ptr<const void> owner;

  int value(int64_t row, int64_t column) const {
    return UnpackedValue(type, values + row * QuantRowBytes(type, columns), column);
  }
};

inline constexpr int kMaxMinimumUnit = 17;

// Computes the integers `values` [QuantRowValues] and the scales [QuantScales] that approximate one
// row. int8, int8-channel: the largest magnitude of a group maps to 127. int4, int4-k: of several
// scales, those with the smallest sum of squared errors are used. A group that contains a value
// that is not finite, or larger in magnitude than the largest f16 (65504), gets a NaN scale, so
// that the error is visible in the results.
void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales);
// Does the same with the given kernels; all kernels compute the same bits.
void QuantizeRow(const rounding::RoundingKernels& kernels, Quantization type,
                 std::span<const float> row, int8_t* values, F16* scales);

// The inverse of QuantizeRow(): computes the elements of a row.
void DequantizeRow(Quantization type, const int8_t* values, const F16* scales,
                   std::span<float> row);

// Packs a row of `columns` columns, values [QuantRowValues], into the format of
// QuantizedMatrix::values.
void PackQuantizedRow(Quantization type, int64_t columns, const int8_t* values, uint8_t* bytes);
// The inverse of PackQuantizedRow().
void UnpackQuantizedRow(Quantization type, int64_t columns, const uint8_t* bytes, int8_t* values);

}  // namespace moeserve

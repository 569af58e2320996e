// Weights as small integers: each group of adjacent columns of a row shares one scale.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"

namespace moeserve {

// Returns the integer of one column of a packed row.
constexpr int UnpackedValue(Quantization type, const uint8_t* bytes, int64_t column) {
  switch (type) {
    case Quantization::kNone:
      break;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      return static_cast<int8_t>(bytes[column]);
    case Quantization::kInt4: {
      const int nibble = column % 2 == 0 ? bytes[column / 2] & 15 : bytes[column / 2] >> 4;
      return nibble < 8 ? nibble : nibble - 16;
    }
  }
  return 0;
}

// A quantized matrix [rows, columns], row-major: element (r, c) is value(r, c) * scale(r, c).
// `owner` keeps both arrays alive.
struct QuantizedMatrix {
  Quantization type = Quantization::kInt8;
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* values = nullptr;  // [rows, QuantRowBytes]
  const F16* scales = nullptr;      // [rows, QuantGroups], 2-byte aligned
  std::shared_ptr<const void> owner;

  int value(int64_t row, int64_t column) const {
    return UnpackedValue(type, values + row * QuantRowBytes(type, columns), column);
  }
  float scale(int64_t row, int64_t column) const {
    return F32FromF16(scales[row * QuantGroups(type, columns) + column / QuantGroup(type)]);
  }
};

// Computes the integers `values` [row.size()] and the scales [QuantGroups] that approximate one
// row. int8, int8-channel: the largest magnitude of a group maps to 127. int4: of several scales,
// the one with the smallest sum of squared errors is used. A group that contains a value that is
// not finite, or larger in magnitude than the largest f16 (65504), gets a NaN scale, so that the
// error is visible in the results.
void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales);

// Packs the integers of a row into the format of QuantizedMatrix::values.
void PackQuantizedRow(Quantization type, std::span<const int8_t> values, uint8_t* bytes);
// The inverse of PackQuantizedRow().
void UnpackQuantizedRow(Quantization type, const uint8_t* bytes, std::span<int8_t> values);

}  // namespace moeserve

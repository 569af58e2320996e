// Weights as small integers: groups of adjacent columns of a row share one scale.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"

namespace moeserve {

// The integer of one column of a row of bytes.
constexpr int UnpackedValue(Quantization type, const uint8_t* bytes, int64_t column) {
  switch (type) {
    case Quantization::kNone:
      break;
    case Quantization::kInt8:
      return static_cast<int8_t>(bytes[column]);
    case Quantization::kInt4: {
      const int nibble = column % 2 == 0 ? bytes[column / 2] & 15 : bytes[column / 2] >> 4;
      return nibble < 8 ? nibble : nibble - 16;
    }
  }
  return 0;
}

// A matrix [rows, columns]: element (r, c) is value(r, c) * scale(r, c / group). Row-major; `owner`
// keeps both arrays alive.
struct QuantizedMatrix {
  Quantization type = Quantization::kInt8;
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* values = nullptr;  // [rows, QuantRowBytes]
  const F16* scales = nullptr;      // [rows, QuantGroups], any alignment of 2
  std::shared_ptr<const void> owner;

  int value(int64_t row, int64_t column) const {
    return UnpackedValue(type, values + row * QuantRowBytes(type, columns), column);
  }
  float scale(int64_t row, int64_t column) const {
    return F32FromF16(scales[row * QuantGroups(type, columns) + column / QuantGroup(type)]);
  }
};

// The nearest integers to one row and its scales. int8: the largest magnitude of a group becomes
// 127. int4: the scale with the smallest sum of squared errors among those tried. A group with a
// value that is not finite, or too large for an f16 scale, gets a NaN scale, so that the fault
// reaches the results. values [row.size()], scales [QuantGroups].
void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales);

// Packs the integers of a row into bytes, the format of QuantizedMatrix::values.
void PackQuantizedRow(Quantization type, std::span<const int8_t> values, uint8_t* bytes);
// The inverse of PackQuantizedRow().
void UnpackQuantizedRow(Quantization type, const uint8_t* bytes, std::span<int8_t> values);

}  // namespace moeserve

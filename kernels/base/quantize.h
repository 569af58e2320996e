// Weights as small integers: groups of adjacent columns of a row share one scale.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/base/dtype.h"

namespace moeserve {

enum class Quantization : uint8_t { kNone, kInt8, kInt4 };

constexpr std::string_view Name(Quantization q) {
  return q == Quantization::kInt8 ? "int8" : q == Quantization::kInt4 ? "int4" : "none";
}

// Columns that share a scale; the last group of a row may be shorter.
constexpr int QuantGroup(Quantization q) { return q == Quantization::kInt8 ? 64 : 32; }
constexpr int64_t QuantGroups(Quantization q, int64_t columns) {
  return (columns + QuantGroup(q) - 1) / QuantGroup(q);
}

// Smallest and largest integer.
constexpr int QuantMin(Quantization q) { return q == Quantization::kInt8 ? -127 : -8; }
constexpr int QuantMax(Quantization q) { return q == Quantization::kInt8 ? 127 : 7; }

// Bytes of the integers of one row: int4 puts two in a byte, the even column in the low four bits,
// both in two's complement; an odd last column leaves the high bits zero.
constexpr int64_t QuantRowBytes(Quantization q, int64_t columns) {
  return q == Quantization::kInt8 ? columns : (columns + 1) / 2;
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
    const uint8_t* bytes = values + row * QuantRowBytes(type, columns);
    if (type == Quantization::kInt8) return static_cast<int8_t>(bytes[column]);
    const int nibble = column % 2 == 0 ? bytes[column / 2] & 15 : bytes[column / 2] >> 4;
    return nibble < 8 ? nibble : nibble - 16;
  }
  float scale(int64_t row, int64_t column) const {
    return F32FromF16(scales[row * QuantGroups(type, columns) + column / QuantGroup(type)]);
  }
};

// The nearest integers to one row and its scales. int8: the largest magnitude of a group becomes
// 127. int4: the scale with the smallest sum of squared errors among those tried. A group with a
// value that is not finite, or too large for an f16 scale, gets a NaN scale, so that it shows.
// values [row.size()], scales [QuantGroups].
void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales);

// Puts the integers of a row into bytes as QuantizedMatrix has them.
void PackQuantizedRow(Quantization type, std::span<const int8_t> values, uint8_t* bytes);
// The other way.
void UnpackQuantizedRow(Quantization type, const uint8_t* bytes, std::span<int8_t> values);

}  // namespace moeserve

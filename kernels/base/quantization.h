// The types of integer weights. They are separate from the conversions (kernels/base/quantize.h)
// because the inner CPU kernels include this file, and those kernels must not instantiate templates
// of the standard library: the linker could keep an instance whose instructions the processor
// lacks.
#pragma once

#include <cstdint>
#include <string_view>

namespace moeserve {

enum class Quantization : uint8_t { kNone, kInt8, kInt8Channel, kInt4, kInt4K };

// The group of types with one scale per row. The sum of so many products of 8-bit integers fits in
// int32; only longer rows have more than one scale.
inline constexpr int kWholeRow = 1 << 16;

struct QuantizationTraits {
  std::string_view name;  // in files, options and reports
  int group;     // number of columns that share a scale; the last group of a row may be shorter
  int min, max;  // smallest and largest integer
  int per_byte;  // number of integers stored in one byte of a file
};

constexpr QuantizationTraits Traits(Quantization q) {
  switch (q) {
    case Quantization::kNone:
      return {"none", 1, 0, 0, 1};
    case Quantization::kInt8:
      return {"int8", 64, -127, 127, 1};
    case Quantization::kInt8Channel:
      return {"int8-channel", kWholeRow, -127, 127, 1};
    case Quantization::kInt4:
      return {"int4", 32, -8, 7, 2};
    case Quantization::kInt4K:
      return {"int4-k", kWholeRow, 0, 15, 2};
  }
  return {};
}

constexpr std::string_view Name(Quantization q) { return Traits(q).name; }

constexpr int QuantGroup(Quantization q) { return Traits(q).group; }
constexpr int64_t QuantGroups(Quantization q, int64_t columns) {
  return (columns + QuantGroup(q) - 1) / QuantGroup(q);
}

// Returns the group size that files state: -1 for one scale per row.
constexpr int StatedGroupSize(Quantization q) {
  return QuantGroup(q) == kWholeRow ? -1 : QuantGroup(q);
}

// int4-k has, beside the scales of a group, a byte of small factors for every 32 columns of it
// (QuantizedMatrix).
inline constexpr int kSubGroup = 32;
constexpr bool HasSubGroups(Quantization q) { return q == Quantization::kInt4K; }
constexpr int64_t QuantSubGroups(Quantization q, int64_t columns) {
  return HasSubGroups(q) ? (columns + kSubGroup - 1) / kSubGroup : 0;
}
// Returns the number of f16 scales of a row.
constexpr int64_t QuantScales(Quantization q, int64_t columns) {
  return QuantGroups(q, columns) * (HasSubGroups(q) ? 2 : 1);
}
// Returns the number of bytes of an unpacked row: its integers and the bytes of its subgroups.
constexpr int64_t QuantRowValues(Quantization q, int64_t columns) {
  return columns + QuantSubGroups(q, columns);
}

constexpr int QuantMin(Quantization q) { return Traits(q).min; }
constexpr int QuantMax(Quantization q) { return Traits(q).max; }

// Returns the number of bytes that the integers of one row take in a file. A byte of int4 (in two's
// complement) or int4-k (unsigned) holds two columns, the even column in the low four bits; if the
// number of columns is odd, the high bits of the last byte are zero. The bytes of subgroups follow.
constexpr int64_t QuantRowBytes(Quantization q, int64_t columns) {
  return (columns + Traits(q).per_byte - 1) / Traits(q).per_byte + QuantSubGroups(q, columns);
}

}  // namespace moeserve

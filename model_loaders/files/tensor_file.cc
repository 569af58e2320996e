#include "model_loaders/files/tensor_file.h"

#include <algorithm>
#include <array>

namespace moeserve {
namespace {

struct TypeRow {
  ElementType type;
  std::string_view name;
  int64_t size;
};

constexpr std::array<TypeRow, 15> kTypes = {{
    {ElementType::kBool, "BOOL", 1},
    {ElementType::kU8, "U8", 1},
    {ElementType::kI8, "I8", 1},
    {ElementType::kF8E5M2, "F8_E5M2", 1},
    {ElementType::kF8E4M3, "F8_E4M3", 1},
    {ElementType::kU16, "U16", 2},
    {ElementType::kI16, "I16", 2},
    {ElementType::kF16, "F16", 2},
    {ElementType::kBF16, "BF16", 2},
    {ElementType::kU32, "U32", 4},
    {ElementType::kI32, "I32", 4},
    {ElementType::kF32, "F32", 4},
    {ElementType::kU64, "U64", 8},
    {ElementType::kI64, "I64", 8},
    {ElementType::kF64, "F64", 8},
}};

}  // namespace

std::string_view Name(ElementType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.name;
  }
  return "?";
}

std::optional<ElementType> ElementTypeFromName(std::string_view name) {
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}

int64_t SizeOf(ElementType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.size;
  }
  return 0;
}

std::optional<int64_t> ByteCount(const std::vector<int64_t>& shape, ElementType type) {
  // A zero dimension makes the product zero, even if the other dimensions would overflow.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = SizeOf(type);
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
  }
  return bytes;
}

Result<TensorData> TensorFile::ReadPart(const TensorEntry& entry, int64_t first,
                                        int64_t count) const {
  MOESERVE_ASSIGN_OR_RETURN(TensorData data, Read(entry));
  const int64_t size = SizeOf(entry.type);
  data.bytes =
      data.bytes.substr(static_cast<size_t>(first * size), static_cast<size_t>(count * size));
  return data;
}

}  // namespace moeserve

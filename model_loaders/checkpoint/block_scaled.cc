#include "model_loaders/checkpoint/block_scaled.h"

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "base/check.h"
#include "base/error_text.h"
#include "kernels/base/buffer.h"
#include "model_loaders/checkpoint/tensor_check.h"

namespace moeserve {
namespace {

constexpr int64_t kMxBlock = 32;  // elements with one scale
constexpr int64_t kMxBlockBytes = 16;

int64_t Blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

// Returns the values of OCP's E2M1: sign, two bits of exponent, one bit of mantissa.
constexpr std::array<float, 16> kMxValues = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                             4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                             -2.0f, -3.0f, -4.0f, -6.0f};

// Returns the value of OCP's E8M0, a power of two.
float FromE8M0(uint8_t bits) {
  return bits == 0xff ? std::nanf("") : std::ldexp(1.0f, static_cast<int>(bits) - 127);
}

// Returns the value of OCP's E4M3, which has no infinities.
float FromE4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 0xf;
  const int mantissa = bits & 7;
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((bits & 0x7f) == 0x7f) magnitude = std::nanf("");
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

std::array<float, 256> TableOf(float (*value)(uint8_t)) {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) table[static_cast<size_t>(i)] = value(static_cast<uint8_t>(i));
  return table;
}

// Returns element `index` of a tensor in the tensor's row-major order.
class MxElements {
 public:
  explicit MxElements(const BlockScaledData& data) : data_(data) {}
  float at(int64_t index) const {
    const auto byte = static_cast<uint8_t>(data_.values[static_cast<size_t>(index / 2)]);
    const float value = kMxValues[index % 2 == 0 ? byte & 0xf : byte >> 4];
    return value *
           scales_[static_cast<uint8_t>(data_.scales[static_cast<size_t>(index / kMxBlock)])];
  }

 private:
  const BlockScaledData data_;
  const std::array<float, 256> scales_ = TableOf(FromE8M0);
};

class Fp8Elements {
 public:
  // `rows` and `columns` are those of one matrix of the tensor.
  Fp8Elements(const BlockScaledData& data, const BlockFormat& format, int64_t rows, int64_t columns)
      : data_(data),
        format_(format),
        rows_(rows),
        columns_(columns),
        scale_rows_(Blocks(rows, format.rows)),
        scale_columns_(Blocks(columns, format.columns)) {
    if (data.scale_type != ElementType::kU8) scales_.dtype = *WeightType(data.scale_type);
    scales_.data = data.scales.data();
  }
  float at(int64_t index) const {
    return values_[static_cast<uint8_t>(data_.values[static_cast<size_t>(index)])] *
           scale_at(index);
  }
  float scale_at(int64_t index) const {
    const int64_t matrix = index / (rows_ * columns_);
    const int64_t row = index / columns_ % rows_;
    const int64_t column = index % columns_;
    return ElementAsF32(scales_, (matrix * scale_rows_ + row / format_.rows) * scale_columns_ +
                                     column / format_.columns);
  }

 private:
  const BlockScaledData data_;
  const BlockFormat format_;
  const int64_t rows_, columns_, scale_rows_, scale_columns_;
  const std::array<float, 256> values_ = TableOf(FromE4M3);
  HostTensor scales_;
};

// Calls store(i, value) for element i of the part, in row-major order.
template <typename Elements, typename Store>
void ForPart(const StoredPart& part, const std::vector<int64_t>& shape, const Elements& elements,
             const Store& store) {
  int64_t columns = 1;
  for (size_t i = 1; i < shape.size(); ++i) columns *= shape[i];
  int64_t n = 0;
  for (int64_t r = 0; r < shape[0]; ++r) {
    int64_t from = part.first_element + r * part.row_stride;
    for (int64_t c = 0; c < columns; ++c, from += part.column_stride) store(n++, elements.at(from));
  }
}

}  // namespace

Result<std::vector<StoredTensor>> BlockScaledTensors(const TensorPlace& place,
                                                     const std::string& follows_from) {
  const BlockFormat& format = place.format;
  MOESERVE_CHECK(place.shape.size() >= 2, "a matrix in blocks");
  std::vector<int64_t> values = place.shape;
  std::vector<int64_t> scales = place.shape;
  switch (format.kind) {
    case BlockFormatKind::kNone:
      break;
    case BlockFormatKind::kMxfp4:
      if (values.back() % kMxBlock != 0) {
        return absl::InvalidArgumentError(
            Concat("tensor ", Quoted(place.name), ": expected rows of a multiple of ", kMxBlock,
                   " elements, found ", values.back(), " (config.json: ", follows_from, ')'));
      }
      values.back() /= kMxBlock;
      values.push_back(kMxBlockBytes);
      scales.back() /= kMxBlock;
      return std::vector<StoredTensor>{{place.name, ElementType::kU8, values, follows_from},
                                       {format.scales, ElementType::kU8, scales, follows_from}};
    case BlockFormatKind::kFp8:
      scales[scales.size() - 2] = Blocks(scales[scales.size() - 2], format.rows);
      scales.back() = Blocks(scales.back(), format.columns);
      return std::vector<StoredTensor>{{place.name, ElementType::kF8E4M3, values, follows_from},
                                       {format.scales, std::nullopt, scales, follows_from}};
  }
  return absl::InternalError("a tensor without a block format");
}

Result<HostTensor> WidenBlockScaled(const StoredPart& part, const BlockScaledData& data,
                                    const std::vector<int64_t>& shape) {
  const bool mx = part.format.kind == BlockFormatKind::kMxfp4;
  HostTensor out{
      .data = nullptr, .dtype = mx ? DType::kBF16 : DType::kF32, .shape = shape, .owner = nullptr};
  const size_t bytes = static_cast<size_t>(out.size()) * SizeOf(out.dtype);
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer buffer, HostBuffer::Allocate(bytes));
  auto owner = std::make_shared<HostBuffer>(std::move(buffer));
  out.data = owner->data();
  if (mx) {
    // Exact: a bf16 has as many bits of exponent as E8M0, and more mantissa than E2M1.
    Bf16* const to = static_cast<Bf16*>(static_cast<void*>(owner->data()));
    ForPart(part, shape, MxElements(data),
            [&](int64_t i, float value) { to[i] = Bf16FromF32(value); });
  } else {
    const auto& stored = part.stored.shape;
    float* const to = static_cast<float*>(static_cast<void*>(owner->data()));
    ForPart(part, shape, Fp8Elements(data, part.format, stored[stored.size() - 2], stored.back()),
            [&](int64_t i, float value) { to[i] = value; });
  }
  out.owner = std::move(owner);
  out.mxfp4 = mx && part.column_stride == 1;
  return out;
}

std::optional<Fp8Matrix> KeptFp8(const StoredPart& part, const BlockScaledData& data,
                                 const std::vector<int64_t>& shape) {
  if (part.format.kind != BlockFormatKind::kFp8 || shape.size() != 2) return std::nullopt;
  const std::vector<int64_t>& stored = part.stored.shape;
  const int64_t columns = stored.back(), block = part.format.columns;
  const int64_t first_column = part.first_element % columns;
  const bool whole_groups = first_column % kFp8ScaleInputs == 0 && block % kFp8ScaleInputs == 0;
  const bool one_block = first_column % block + shape[1] <= block;
  if (part.column_stride != 1 || part.row_stride % columns != 0 || !(whole_groups || one_block)) {
    return std::nullopt;
  }
  Fp8Matrix matrix{
      .rows = shape[0],
      .columns = shape[1],
      .values = reinterpret_cast<const uint8_t*>(data.values.data()) + part.first_element,
      .row_stride = part.row_stride,
      .scales = {},
      .owner = nullptr};
  const Fp8Elements elements(data, part.format, stored[stored.size() - 2], columns);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const int64_t row = part.first_element + r * part.row_stride;
    for (int64_t g = 0; g < matrix.groups(); ++g) {
      matrix.scales.push_back(elements.scale_at(row + g * kFp8ScaleInputs));
    }
  }
  return matrix;
}

}  // namespace moeserve

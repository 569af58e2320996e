#include "model_loaders/checkpoint/quantized_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error_text.h"

namespace moeserve {
namespace {

constexpr F16 kF16Exponent = 0x7c00;  // exponent bits of infinity and NaN

std::string Place(std::string_view tensor, int64_t row, int64_t column) {
  return Concat(tensor, ": row ", row, ", column ", column, ": ");
}

absl::Status CheckInt8(const QuantizedMatrix& matrix, std::string_view name) {
  const auto* bad = static_cast<const uint8_t*>(
      std::memchr(matrix.values, 0x80, static_cast<size_t>(matrix.rows * matrix.columns)));
  if (bad == nullptr) return absl::OkStatus();
  const int64_t at = bad - matrix.values;
  return absl::InvalidArgumentError(Concat(Place(name, at / matrix.columns, at % matrix.columns),
                                           "expected an integer in [", QuantMin(matrix.type), ", ",
                                           QuantMax(matrix.type), "], found -128"));
}

absl::Status CheckInt4(const QuantizedMatrix& matrix, std::string_view name) {
  if (matrix.columns % 2 == 0) return absl::OkStatus();
  const int64_t row_bytes = QuantRowBytes(matrix.type, matrix.columns);
  const int64_t last = matrix.columns / 2;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const int high = matrix.values[r * row_bytes + last] >> 4;
    if (high == 0) continue;
    return absl::InvalidArgumentError(Concat(Place(name, r, last),
                                             "expected zero in the high bits (the row has ",
                                             matrix.columns, " columns), found ", high));
  }
  return absl::OkStatus();
}

// Every second scale of a row of int4-k is an integer.
absl::Status CheckMinimumUnits(const QuantizedMatrix& matrix, std::string_view name) {
  const int64_t scales = QuantScales(matrix.type, matrix.columns);
  for (int64_t i = 1; i < matrix.rows * scales; i += 2) {
    const float unit = F32FromF16(matrix.scales[i]);
    if (unit >= 0.0f && unit <= static_cast<float>(kMaxMinimumUnit) && unit == std::floor(unit)) {
      continue;
    }
    return absl::InvalidArgumentError(Concat(Place(name, i / scales, i % scales),
                                             "expected an integer in [0, ", kMaxMinimumUnit,
                                             "], found ", absl::StrCat(unit)));
  }
  return absl::OkStatus();
}

}  // namespace

bool HasShape(const StoredTensor& stored, const std::vector<int64_t>& found) {
  if (!stored.units) return found == stored.shape;
  const auto without_units = [](std::vector<int64_t> shape) {
    std::erase(shape, 1);
    return shape;
  };
  return without_units(found) == without_units(stored.shape);
}

std::string ScaleName(std::string_view weight) { return Concat(weight, "_scale"); }

std::vector<StoredTensor> StoredTensors(const TensorRequirement& tensor, Quantization folder) {
  const Quantization type = QuantizationOf(tensor.name, tensor.shape, folder);
  if (type == Quantization::kNone) {
    return {{tensor.name, std::nullopt, tensor.shape, tensor.follows_from, tensor.ids}};
  }
  const int64_t rows = tensor.shape[0];
  const int64_t columns = tensor.shape[1];
  const std::string key = Concat("; quantization.type is \"", Name(folder), '"');
  const std::string grouped = StatedGroupSize(type) < 0
                                  ? Concat(", ", QuantScales(type, 1), " to a row")
                                  : Concat(", ", QuantGroup(type), " columns in a group");
  const std::string halved =
      Concat(Traits(type).per_byte == 2 ? ", two columns in a byte" : "",
             HasSubGroups(type) ? Concat(", then a byte for ", kSubGroup, " columns") : "");
  return {{tensor.name,
           Traits(type).per_byte == 1 ? ElementType::kI8 : ElementType::kU8,
           {rows, QuantRowBytes(type, columns)},
           Concat(tensor.follows_from, halved, key)},
          {ScaleName(tensor.name),
           ElementType::kF16,
           {rows, QuantScales(type, columns)},
           Concat(tensor.follows_from, grouped, key)}};
}

absl::Status CheckQuantizedMatrix(const QuantizedMatrix& matrix, std::string_view integers,
                                  std::string_view scales) {
  switch (matrix.type) {
    case Quantization::kNone:
      return absl::InternalError("a matrix without integers");
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      MOESERVE_RETURN_IF_ERROR(CheckInt8(matrix, integers));
      break;
    case Quantization::kInt4:
      MOESERVE_RETURN_IF_ERROR(CheckInt4(matrix, integers));
      break;
    case Quantization::kInt4K:
      MOESERVE_RETURN_IF_ERROR(CheckInt4(matrix, integers));
      MOESERVE_RETURN_IF_ERROR(CheckMinimumUnits(matrix, scales));
      break;
  }
  const int64_t groups = QuantScales(matrix.type, matrix.columns);
  for (int64_t i = 0; i < matrix.rows * groups; ++i) {
    const F16 scale = matrix.scales[i];
    if ((scale & kF16Exponent) != kF16Exponent) continue;
    const bool nan = (scale & 0x3ff) != 0;
    return absl::InvalidArgumentError(Concat(Place(scales, i / groups, i % groups),
                                             "expected a finite number, found ",
                                             nan ? "NaN" : "an infinite one"));
  }
  return absl::OkStatus();
}

Result<HostTensor> Dequantize(const QuantizedMatrix& matrix) {
  const int64_t size = matrix.rows * matrix.columns;
  const std::shared_ptr<float[]> owner(new (std::nothrow) float[static_cast<size_t>(size)]);
  if (owner == nullptr) {
    return absl::ResourceExhaustedError(Concat("not enough memory to widen a matrix ",
                                               ShapeText({matrix.rows, matrix.columns}), ": ",
                                               size * 4, " bytes"));
  }
  float* out = owner.get();
  const int64_t scales = QuantScales(matrix.type, matrix.columns);
  const int64_t row_bytes = QuantRowBytes(matrix.type, matrix.columns);
  std::vector<int8_t> row(static_cast<size_t>(QuantRowValues(matrix.type, matrix.columns)));
  for (int64_t r = 0; r < matrix.rows; ++r, out += matrix.columns) {
    UnpackQuantizedRow(matrix.type, matrix.columns, matrix.values + r * row_bytes, row.data());
    DequantizeRow(matrix.type, row.data(), matrix.scales + r * scales,
                  {out, static_cast<size_t>(matrix.columns)});
  }
  return HostTensor{.data = owner.get(),
                    .dtype = DType::kF32,
                    .shape = {matrix.rows, matrix.columns},
                    .owner = owner};
}

absl::Status CheckQuantizedData(const ModelSpec& spec, WeightSource& weights) {
  if (weights.StoredQuantization() == Quantization::kNone) return absl::OkStatus();
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    const Quantization type =
        QuantizationOf(tensor.name, tensor.shape, weights.StoredQuantization());
    if (type == Quantization::kNone) continue;
    const auto matrix = weights.GetQuantized(tensor.name, tensor.shape, type);
    MOESERVE_RETURN_IF_ERROR(matrix.status());
  }
  return absl::OkStatus();
}

}  // namespace moeserve

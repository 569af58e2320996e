#include "model_loaders/checkpoint/folder_weights.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/checkpoint/block_scaled.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/checkpoint/tensor_check.h"

namespace moeserve {
namespace {

DType Dominant(const WeightFiles& files, Quantization quantization) {
  std::array<uint64_t, 3> bytes{};  // [DType]: bytes of the tensors of that type
  for (const WeightFiles::Location& tensor : files.tensors()) {
    std::optional<DType> type = WeightType(tensor.entry->type);
    // bf16 is the narrowest type for weights that are stored in blocks of fewer bits.
    if (quantization == Quantization::kNone &&
        (tensor.entry->type == ElementType::kU8 || tensor.entry->type == ElementType::kF8E4M3)) {
      type = DType::kBF16;
    }
    const bool scale =
        quantization != Quantization::kNone && tensor.entry->name.ends_with(".weight_scale");
    if (type.has_value() && !scale) {
      // What is stored in a smaller form than f32 has no need of its precision.
      const DType used = tensor.entry->converted_from.empty() ? *type : DType::kBF16;
      bytes[static_cast<size_t>(used)] += tensor.entry->end - tensor.entry->begin;
    }
  }
  DType dominant = DType::kF32;
  for (const DType type : {DType::kF16, DType::kBF16}) {
    if (bytes[static_cast<size_t>(type)] > bytes[static_cast<size_t>(dominant)]) dominant = type;
  }
  return dominant;
}

std::vector<std::shared_ptr<const MappedFile>> MappedFilesOf(const WeightFiles& files) {
  std::vector<std::shared_ptr<const MappedFile>> mapped;
  for (const std::shared_ptr<const TensorFile>& file : files.files()) {
    mapped.push_back(file->mapped());
  }
  return mapped;
}

// The name of the type in GGUF files.
constexpr std::string_view kMxfp4 = "MXFP4";

// Returns whether a stored tensor may have the type `found`.
bool HasType(const StoredTensor& stored, ElementType found) {
  if (stored.ids) return found == ElementType::kI32 || found == ElementType::kI64;
  return stored.type.has_value() ? found == *stored.type : WeightType(found).has_value();
}

// Returns element i of I32 or I64 data.
int64_t FolderIntegerAt(std::string_view bytes, ElementType type, int64_t i) {
  if (type == ElementType::kI64) {
    int64_t wide;
    std::memcpy(&wide, bytes.data() + 8 * i, sizeof(wide));
    return wide;
  }
  int32_t narrow;
  std::memcpy(&narrow, bytes.data() + 4 * i, sizeof(narrow));
  return narrow;
}

// A copy of scales that the file stores at an odd offset, and the data of their integers.
struct AlignedScales {
  std::shared_ptr<const void> integers;
  std::vector<F16> scales;
};

// Keeps the data of the integers and of the scales.
using TwoOwners = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;

// Returns the stored row of row `r` of a part, counted from the part's first one.
int64_t StoredRow(const StoredPart& part, int64_t r) {
  if (const int64_t group = part.paired_rows; group != 0) {
    const int64_t i = r % group;
    const int64_t half = group / 2;
    return r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
  }
  if (part.group_rows != 0) r = r / part.group_rows * part.group_stride + r % part.group_rows;
  return part.row_blocks.Stored(r);
}

// Returns a copy of a part of a stored tensor; `bytes` are those of the whole stored tensor. The
// copy has the stored type, or f32 if its elements are computed.
HostTensor CopyPart(const StoredPart& part, DType type, std::string_view bytes,
                    const std::vector<int64_t>& shape) {
  int64_t columns = 1;
  for (size_t i = 1; i < shape.size(); ++i) columns *= shape[i];
  const ElementFunction& function = part.function;
  const bool computes = part.add != 0.0f || function.apply != nullptr;
  const DType copied = computes ? DType::kF32 : type;
  const int64_t element = SizeOf(type);
  auto copy =
      std::make_shared<std::vector<char>>(static_cast<size_t>(shape[0] * columns * SizeOf(copied)));
  const HostTensor whole{.data = bytes.data(), .dtype = type, .shape = {}, .owner = nullptr};
  char* out = copy->data();
  for (int64_t r = 0; r < shape[0]; ++r) {
    const int64_t row = part.first_element + StoredRow(part, r) * part.row_stride;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t from = row + part.column_blocks.Stored(c) * part.column_stride;
      if (computes) {
        float value = ElementAsF32(whole, from);
        if (function.apply != nullptr) value = function.apply(value);
        value += part.add;
        std::memcpy(out, &value, sizeof(value));
      } else {
        std::memcpy(out, bytes.data() + from * element, static_cast<size_t>(element));
      }
      out += SizeOf(copied);
    }
  }
  return {.data = copy->data(), .dtype = copied, .shape = shape, .owner = copy};
}

// Returns InvalidArgument if the part's function has no finite value for an element.
absl::Status CheckFunction(const StoredPart& part, const HostTensor& values,
                           std::string_view file) {
  if (part.function.apply == nullptr) return absl::OkStatus();
  for (int64_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(ElementAsF32(values, i))) continue;
    return absl::InvalidArgumentError(Concat(Printable(file), ": tensor ", Quoted(part.stored.name),
                                             ": expected ", part.function.domain,
                                             ", found another value"));
  }
  return absl::OkStatus();
}

}  // namespace

FolderWeights::FolderWeights(WeightFiles files, std::unique_ptr<const CheckpointConfig> config)
    : files_(std::move(files)),
      config_(std::move(config)),
      dominant_(Dominant(files_, config_->quantization)),
      read_ahead_(MappedFilesOf(files_)) {
  for (const WeightFiles::Location& tensor : files_.tensors()) {
    stored_bytes_ += static_cast<int64_t>(tensor.file->StoredBytes(*tensor.entry));
  }
}

Result<std::vector<FolderWeights::FoundPart>> FolderWeights::Find(
    const TensorRequirement& tensor) const {
  MOESERVE_ASSIGN_OR_RETURN(std::vector<StoredPart> parts, StoredParts(*config_, tensor));
  std::vector<FoundPart> found;
  for (StoredPart& part : parts) {
    const StoredTensor& stored = part.stored;
    const WeightFiles::Location* location = files_.Find(stored.name);
    if (location == nullptr || !HasShape(stored, location->entry->shape) ||
        !HasType(stored, location->entry->type)) {
      return absl::InternalError(Concat("tensor ", Quoted(stored.name), " ",
                                        ShapeText(stored.shape),
                                        " was asked for but is not one that the checkpoint was "
                                        "checked against"));
    }
    found.push_back({std::move(part), location});
  }
  return found;
}

TensorData FolderWeights::ReadOnce(const TensorFile& file, TensorData data) const {
  const std::string_view all = file.mapped()->bytes();
  const bool mapped = data.bytes.data() >= all.data() &&
                      data.bytes.data() + data.bytes.size() <= all.data() + all.size();
  if (mapped) {
    read_ahead_.Use(data.bytes);
    data.owner = MappedFile::ReadOnce(file.mapped(), data.bytes);
  }
  return data;
}

Result<HostTensor> FolderWeights::Get(std::string_view name, const std::vector<int64_t>& shape) {
  const Quantization stored = QuantizationOf(name, shape, config_->quantization);
  if (stored != Quantization::kNone) {
    MOESERVE_ASSIGN_OR_RETURN(const QuantizedMatrix matrix, Integers(name, shape, stored));
    return Dequantize(matrix);
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<FoundPart> found,
                            Find({std::string(name), shape, ""}));
  const auto& [file, entry] = *found[0].location;
  const StoredPart& part = found[0].part;
  if (part.format.kind != BlockFormatKind::kNone) {
    const auto& [scale_file, scale_entry] = *found[1].location;
    MOESERVE_ASSIGN_OR_RETURN(TensorData values, file->Read(*entry));
    values = ReadOnce(*file, std::move(values));
    MOESERVE_ASSIGN_OR_RETURN(const TensorData scales, scale_file->Read(*scale_entry));
    return WidenBlockScaled(
        part, {.values = values.bytes, .scales = scales.bytes, .scale_type = scale_entry->type},
        shape);
  }
  if (!part.contiguous) {
    MOESERVE_ASSIGN_OR_RETURN(TensorData whole, file->Read(*entry));
    whole = ReadOnce(*file, std::move(whole));
    HostTensor copy = CopyPart(part, *WeightType(entry->type), whole.bytes, shape);
    copy.mxfp4 = entry->converted_from == kMxfp4 && part.column_stride == 1;
    if (absl::Status fault = CheckFunction(part, copy, file->file_name()); !fault.ok()) {
      MOESERVE_RETURN_IF_ERROR(
          Check());  // zeros of a damaged file are not a fault of the checkpoint
      return fault;
    }
    return copy;
  }
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  MOESERVE_ASSIGN_OR_RETURN(TensorData data, file->ReadPart(*entry, part.first_element, count));
  data = ReadOnce(*file, std::move(data));
  return HostTensor{.data = data.bytes.data(),
                    .dtype = *WeightType(entry->type),
                    .shape = shape,
                    .owner = data.owner,
                    .mxfp4 = entry->converted_from == kMxfp4};
}

Result<std::optional<QuantizedMatrix>> FolderWeights::GetQuantized(
    std::string_view name, const std::vector<int64_t>& shape, Quantization type) {
  if (type == Quantization::kNone || QuantizationOf(name, shape, config_->quantization) != type) {
    return std::optional<QuantizedMatrix>();
  }
  MOESERVE_ASSIGN_OR_RETURN(QuantizedMatrix matrix, Integers(name, shape, type));
  return std::optional<QuantizedMatrix>(std::move(matrix));
}

Result<std::optional<Fp8Matrix>> FolderWeights::GetFp8(std::string_view name,
                                                       const std::vector<int64_t>& shape) {
  if (QuantizationOf(name, shape, config_->quantization) != Quantization::kNone) {
    return std::optional<Fp8Matrix>();
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<FoundPart> found,
                            Find({std::string(name), shape, ""}));
  const StoredPart& part = found[0].part;
  if (part.format.kind != BlockFormatKind::kFp8) return std::optional<Fp8Matrix>();
  const auto& [file, entry] = *found[0].location;
  const auto& [scale_file, scale_entry] = *found[1].location;
  MOESERVE_ASSIGN_OR_RETURN(TensorData values, file->Read(*entry));
  MOESERVE_ASSIGN_OR_RETURN(const TensorData scales, scale_file->Read(*scale_entry));
  const BlockScaledData data{
      .values = values.bytes, .scales = scales.bytes, .scale_type = scale_entry->type};
  std::optional<Fp8Matrix> matrix = KeptFp8(part, data, shape);
  if (matrix.has_value()) matrix->owner = ReadOnce(*file, std::move(values)).owner;
  return matrix;
}

absl::Status FolderWeights::Check() const {
  for (const std::shared_ptr<const TensorFile>& file : files_.files()) {
    MOESERVE_RETURN_IF_ERROR(file->mapped()->Check());
  }
  return absl::OkStatus();
}

Result<std::vector<int32_t>> FolderWeights::GetIds(std::string_view name,
                                                   const std::vector<int64_t>& shape) {
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<FoundPart> found,
                            Find({std::string(name), shape, "", true}));
  const auto& [file, entry] = *found[0].location;
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  MOESERVE_ASSIGN_OR_RETURN(TensorData data,
                            file->ReadPart(*entry, found[0].part.first_element, count));
  data = ReadOnce(*file, std::move(data));
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = FolderIntegerAt(data.bytes, entry->type, i);
    ids[static_cast<size_t>(i)] = static_cast<int32_t>(id);
    if (ids[static_cast<size_t>(i)] != id) {
      return absl::InvalidArgumentError(Concat(Printable(file->file_name()), ": tensor ",
                                               Quoted(entry->name), ": element ", i,
                                               ": expected an integer of 32 bits, found ", id));
    }
  }
  return ids;
}

Result<QuantizedMatrix> FolderWeights::Integers(std::string_view name,
                                                const std::vector<int64_t>& shape,
                                                Quantization type) const {
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<FoundPart> found,
                            Find({std::string(name), shape, ""}));
  const WeightFiles::Location& integers = *found[0].location;
  const WeightFiles::Location& scales = *found[1].location;
  MOESERVE_ASSIGN_OR_RETURN(TensorData integer_data, integers.file->Read(*integers.entry));
  integer_data = ReadOnce(*integers.file, std::move(integer_data));
  MOESERVE_ASSIGN_OR_RETURN(const TensorData scale_data, scales.file->Read(*scales.entry));
  const std::string_view scale_bytes = scale_data.bytes;
  QuantizedMatrix matrix{.type = type,
                         .rows = shape[0],
                         .columns = shape[1],
                         .values = reinterpret_cast<const uint8_t*>(integer_data.bytes.data()),
                         .scales = nullptr,
                         .owner = nullptr};
  if (reinterpret_cast<uintptr_t>(scale_bytes.data()) % alignof(F16) == 0) {
    matrix.scales = reinterpret_cast<const F16*>(scale_bytes.data());
    matrix.owner = std::make_shared<TwoOwners>(integer_data.owner, scale_data.owner);
  } else {
    auto copy = std::make_shared<AlignedScales>();
    copy->integers = integer_data.owner;
    copy->scales.resize(scale_bytes.size() / sizeof(F16));
    std::memcpy(copy->scales.data(), scale_bytes.data(), scale_bytes.size());
    matrix.scales = copy->scales.data();
    matrix.owner = std::move(copy);
  }
  const auto place = [](const WeightFiles::Location& tensor) {
    return Concat(Printable(tensor.file->file_name()), ": tensor ", Quoted(tensor.entry->name));
  };
  if (const absl::Status fault = CheckQuantizedMatrix(matrix, place(integers), place(scales));
      !fault.ok()) {
    MOESERVE_RETURN_IF_ERROR(Check());  // zeros of a damaged file are not a fault of the checkpoint
    return fault;
  }
  return matrix;
}

}  // namespace moeserve

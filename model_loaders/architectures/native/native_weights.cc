#include "model_loaders/architectures/native/native_weights.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "base/message.h"
#include "model_loaders/quantize/quantized_tensors.h"
#include "model_loaders/tensor_check.h"

namespace moeserve {
namespace {

DType Dominant(const WeightFiles& files, Quantization quantization) {
  std::array<uint64_t, 3> bytes{};  // by DType
  for (const WeightFiles::Location& tensor : files.tensors()) {
    const std::optional<DType> type = WeightType(tensor.entry->type);
    const bool scale =
        quantization != Quantization::kNone && tensor.entry->name.ends_with(".weight_scale");
    if (type.has_value() && !scale) {
      bytes[static_cast<size_t>(*type)] += tensor.entry->end - tensor.entry->begin;
    }
  }
  DType dominant = DType::kF32;
  for (const DType type : {DType::kF16, DType::kBF16}) {
    if (bytes[static_cast<size_t>(type)] > bytes[static_cast<size_t>(dominant)]) dominant = type;
  }
  return dominant;
}

// Scales that lie at an odd address, copied, together with the file of their integers.
struct AlignedScales {
  std::shared_ptr<const SafetensorsFile> file;
  std::vector<F16> scales;
};

// The files of a matrix.
using TwoFiles =
    std::pair<std::shared_ptr<const SafetensorsFile>, std::shared_ptr<const SafetensorsFile>>;

}  // namespace

NativeWeights::NativeWeights(WeightFiles files, Quantization quantization)
    : files_(std::move(files)),
      quantization_(quantization),
      dominant_(Dominant(files_, quantization)) {
  for (const WeightFiles::Location& tensor : files_.tensors()) {
    stored_bytes_ += static_cast<int64_t>(tensor.entry->end - tensor.entry->begin);
  }
}

Result<HostTensor> NativeWeights::Get(std::string_view name, const std::vector<int64_t>& shape) {
  const Quantization stored = QuantizationOf(name, shape, quantization_);
  if (stored != Quantization::kNone) {
    MOESERVE_ASSIGN_OR_RETURN(const QuantizedMatrix matrix, Integers(name, shape, stored));
    return Dequantize(matrix);
  }
  const WeightFiles::Location* found = files_.Find(name);
  const std::optional<DType> type =
      found == nullptr ? std::nullopt : WeightType(found->entry->type);
  if (!type.has_value() || found->entry->shape != shape) {
    return absl::InternalError(Concat("tensor ", Quoted(name), " ", ShapeText(shape),
                                      " was asked for but is not one that the checkpoint was "
                                      "checked against"));
  }
  return HostTensor{.data = found->file->Bytes(*found->entry).data(),
                    .dtype = *type,
                    .shape = shape,
                    .owner = found->file};
}

Result<std::optional<QuantizedMatrix>> NativeWeights::GetQuantized(
    std::string_view name, const std::vector<int64_t>& shape, Quantization type) {
  if (type == Quantization::kNone || QuantizationOf(name, shape, quantization_) != type) {
    return std::optional<QuantizedMatrix>();
  }
  MOESERVE_ASSIGN_OR_RETURN(QuantizedMatrix matrix, Integers(name, shape, type));
  return std::optional<QuantizedMatrix>(std::move(matrix));
}

Result<QuantizedMatrix> NativeWeights::Integers(std::string_view name,
                                                const std::vector<int64_t>& shape,
                                                Quantization type) {
  const std::vector<StoredTensor> stored =
      StoredTensors({std::string(name), shape, ""}, quantization_);
  const WeightFiles::Location* part[2];
  for (int i = 0; i < 2; ++i) {
    part[i] = files_.Find(stored[i].name);
    if (part[i] == nullptr || part[i]->entry->type != stored[i].type ||
        part[i]->entry->shape != stored[i].shape) {
      return absl::InternalError(Concat("tensor ", Quoted(stored[i].name), " ",
                                        ShapeText(stored[i].shape),
                                        " was asked for but is not one that the checkpoint was "
                                        "checked against"));
    }
  }
  const std::string_view integers = part[0]->file->Bytes(*part[0]->entry);
  const std::string_view scales = part[1]->file->Bytes(*part[1]->entry);
  QuantizedMatrix matrix{.type = type,
                         .rows = shape[0],
                         .columns = shape[1],
                         .values = reinterpret_cast<const uint8_t*>(integers.data()),
                         .scales = nullptr,
                         .owner = nullptr};
  if (reinterpret_cast<uintptr_t>(scales.data()) % alignof(F16) == 0) {
    matrix.scales = reinterpret_cast<const F16*>(scales.data());
    matrix.owner = std::make_shared<TwoFiles>(part[0]->file, part[1]->file);
  } else {
    auto copy = std::make_shared<AlignedScales>();
    copy->file = part[0]->file;
    copy->scales.resize(scales.size() / sizeof(F16));
    std::memcpy(copy->scales.data(), scales.data(), scales.size());
    matrix.scales = copy->scales.data();
    matrix.owner = std::move(copy);
  }
  const auto place = [&](int i) {
    return Concat(Printable(part[i]->file->file_name()), ": tensor ", Quoted(stored[i].name));
  };
  MOESERVE_RETURN_IF_ERROR(CheckQuantizedMatrix(matrix, place(0), place(1)));
  return matrix;
}

}  // namespace moeserve

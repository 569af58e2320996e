#include "model_loaders/native_weights.h"

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "model_loaders/message.h"
#include "model_loaders/tensor_check.h"

namespace moeserve {
namespace {

DType Dominant(const WeightFiles& files) {
  std::array<uint64_t, 3> bytes{};  // by DType
  for (const WeightFiles::Location& tensor : files.tensors()) {
    const std::optional<DType> type = WeightType(tensor.entry->type);
    if (type.has_value()) {
      bytes[static_cast<size_t>(*type)] += tensor.entry->end - tensor.entry->begin;
    }
  }
  DType dominant = DType::kF32;
  for (const DType type : {DType::kF16, DType::kBF16}) {
    if (bytes[static_cast<size_t>(type)] > bytes[static_cast<size_t>(dominant)]) dominant = type;
  }
  return dominant;
}

}  // namespace

NativeWeights::NativeWeights(WeightFiles files)
    : files_(std::move(files)), dominant_(Dominant(files_)) {}

Result<HostTensor> NativeWeights::Get(std::string_view name, const std::vector<int64_t>& shape) {
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

}  // namespace moeserve

// Weights of a checked folder as the model asks for them.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/files/weight_files.h"
#include "model_loaders/stored_parts.h"

namespace moeserve {

// Hands out views of the mapped files. A HostTensor keeps its file mapped, so tensors may outlive
// this object.
class FolderWeights final : public WeightSource {
 public:
  // `files` has passed CheckTensors() for `config`.
  FolderWeights(WeightFiles files, std::unique_ptr<const CheckpointConfig> config);

  // Both check integers and scales (CheckQuantizedMatrix()) on every call: InvalidArgument with
  // file, tensor, row and column. Get() widens integers into memory of the tensor's own.
  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override;
  Quantization StoredQuantization() const override { return config_->quantization; }
  // Of the stored tensors except integers and their scales. The wider type if shares are equal.
  DType DominantDType() const override { return dominant_; }

  // Bytes of all tensors in the files.
  int64_t stored_bytes() const { return stored_bytes_; }

 private:
  // A part of a stored tensor, and the file that has it.
  struct FoundPart {
    StoredPart part;
    const WeightFiles::Location* location = nullptr;
  };
  // StoredParts() in the files; Internal if one is not there in its shape.
  Result<std::vector<FoundPart>> Find(std::string_view name,
                                      const std::vector<int64_t>& shape) const;
  Result<QuantizedMatrix> Integers(std::string_view name, const std::vector<int64_t>& shape,
                                   Quantization type) const;

  const WeightFiles files_;
  const std::unique_ptr<const CheckpointConfig> config_;
  const DType dominant_;
  int64_t stored_bytes_ = 0;
};

}  // namespace moeserve

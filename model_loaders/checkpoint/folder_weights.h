// Returns the weights of a checked folder under the model's names.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/stored_parts.h"
#include "model_loaders/files/read_ahead.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// Returns views of the mapped files where these store a tensor without gaps, else copies. A
// HostTensor owns its copy or keeps its file mapped, so tensors may outlive this object.
class FolderWeights final : public WeightSource {
 public:
  // `files` must have passed CheckTensors() for `config`.
  FolderWeights(WeightFiles files, std::unique_ptr<const CheckpointConfig> config);

  // Get() and GetQuantized() check a matrix of integers and its scales on every call:
  // InvalidArgument, with file, tensor, row and column, if CheckQuantizedMatrix() refuses them.
  // Get() converts integers to floating point, in memory that the tensor owns.
  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override;
  Result<std::optional<Fp8Matrix>> GetFp8(std::string_view name,
                                          const std::vector<int64_t>& shape) override;
  // Reads I32 and I64. Does not compare the ids with the number of experts.
  Result<std::vector<int32_t>> GetIds(std::string_view name,
                                      const std::vector<int64_t>& shape) override;
  Quantization StoredQuantization() const override { return config_->quantization; }
  absl::Status Check() const override;
  // Returns the type with the most bytes among the stored tensors, except integers and their
  // scales; the wider type if two have equally many.
  DType DominantDType() const override { return dominant_; }

  // Returns the bytes of all tensors in the files.
  int64_t stored_bytes() const { return stored_bytes_; }

 private:
  // A part of a stored tensor, and where the files have that tensor.
  struct FoundPart {
    StoredPart part;
    const WeightFiles::Location* location = nullptr;
  };
  // Finds the StoredParts() of a tensor in the files. Internal if a stored tensor is missing or has
  // another shape.
  Result<std::vector<FoundPart>> Find(const TensorRequirement& tensor) const;
  Result<QuantizedMatrix> Integers(std::string_view name, const std::vector<int64_t>& shape,
                                   Quantization type) const;

  // Returns a view of a mapped file as one whose pages are given up after its use, and lets the
  // system read what follows. Returns copies as they are.
  TensorData ReadOnce(const TensorFile& file, TensorData data) const;

  const WeightFiles files_;
  const std::unique_ptr<const CheckpointConfig> config_;
  const DType dominant_;
  mutable ReadAhead read_ahead_;
  int64_t stored_bytes_ = 0;
};

}  // namespace moeserve

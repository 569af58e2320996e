// Weights of a checked folder as the model asks for them.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "engine/spec/weights.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// Hands out views of the mapped files. A HostTensor keeps its file mapped, so tensors may outlive
// this object.
class NativeWeights final : public WeightSource {
 public:
  // `files` has passed CheckTensors() for a configuration of that quantization.
  NativeWeights(WeightFiles files, Quantization quantization);

  // Integers and scales are checked here (CheckQuantizedMatrix()), each time they are asked for:
  // InvalidArgument with file, tensor and place. Those that are widened take memory of their own.
  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override;
  Quantization StoredQuantization() const override { return quantization_; }
  // Of tensors that are not integers and scales. Of equal shares the wider type.
  DType DominantDType() const override { return dominant_; }

  // Bytes of all tensors in the files.
  int64_t stored_bytes() const { return stored_bytes_; }

 private:
  Result<QuantizedMatrix> Integers(std::string_view name, const std::vector<int64_t>& shape,
                                   Quantization type);

  const WeightFiles files_;
  const Quantization quantization_;
  const DType dominant_;
  int64_t stored_bytes_ = 0;
};

}  // namespace moeserve

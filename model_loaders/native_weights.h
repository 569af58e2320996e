// Weights of a checked folder as the model asks for them.
#pragma once

#include <string_view>
#include <vector>

#include "engine/model/weights.h"
#include "model_loaders/weight_files.h"

namespace moeserve {

// Hands out views of the mapped files. A HostTensor keeps its file mapped, so tensors may outlive
// this object.
class NativeWeights final : public WeightSource {
 public:
  // `files` has passed CheckTensors().
  explicit NativeWeights(WeightFiles files);

  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  // Of equal shares the wider type.
  DType DominantDType() const override { return dominant_; }

 private:
  const WeightFiles files_;
  const DType dominant_;
};

}  // namespace moeserve

// How a model gets its weights: by name, with the shape its specification demands.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/spec.h"
#include "kernels/base/dtype.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/status.h"

namespace moeserve {

// One tensor that a specification implies.
struct TensorRequirement {
  std::string name;  // "blocks.0.attention.q.weight"
  std::vector<int64_t> shape;
  std::string follows_from;  // configuration keys the shape follows from
};

// Every tensor of the model, in file order of native-format documentation; nothing else may exist.
std::vector<TensorRequirement> RequiredTensors(const ModelSpec& spec);

// Source of weights. Single-threaded.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // The tensor of that name. The source has been checked against RequiredTensors(), so an absent
  // name or another shape is an internal error.
  virtual Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) = 0;

  // The dtype most of the weight bytes have; `--dtype auto` follows it.
  virtual DType DominantDType() const = 0;
};

}  // namespace moeserve

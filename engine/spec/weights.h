// How a model gets its weights: by name, with the shape that its specification requires.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "kernels/base/dtype.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/quantize.h"

namespace moeserve {

// One tensor that a specification requires.
struct TensorRequirement {
  std::string name;  // "blocks.0.attention.q.weight"
  std::vector<int64_t> shape;
  std::string follows_from;  // the configuration keys that determine the shape
};

// Returns every tensor of the model, in the order in which the native format documents them. A
// checkpoint may contain no other tensor.
std::vector<TensorRequirement> RequiredTensors(const ModelSpec& spec);

// Returns how a tensor of this name and shape is stored when weights are quantized as `type`:
// matrices of experts and projections as `type`, an untied LM head as int8. Routers, norms, biases,
// embeddings (a tied LM head included) and the gate of a shared expert, one row, stay unquantized.
Quantization QuantizationOf(std::string_view name, const std::vector<int64_t>& shape,
                            Quantization type);

// Source of weights. Single-threaded.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // Returns the tensor `name`. The source was checked against RequiredTensors() before, so a
  // missing tensor or another shape is an internal error. A tensor that is stored as integers is
  // dequantized to f32, which is exact.
  virtual Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) = 0;

  // Returns the tensor as stored if it is stored as integers of `type`; otherwise nullopt.
  virtual Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                              const std::vector<int64_t>& shape,
                                                              Quantization type) {
    (void)name, (void)shape, (void)type;
    return std::optional<QuantizedMatrix>();
  }

  // Returns how the matrices of experts and projections are stored; `--dtype auto` uses it.
  virtual Quantization StoredQuantization() const { return Quantization::kNone; }

  // Returns the dtype of the largest share of the weight bytes; `--dtype auto` uses it.
  virtual DType DominantDType() const = 0;
};

}  // namespace moeserve

// How a model gets its weights: by name, with the shape its specification demands.
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

// One tensor that a specification implies.
struct TensorRequirement {
  std::string name;  // "blocks.0.attention.q.weight"
  std::vector<int64_t> shape;
  std::string follows_from;  // configuration keys the shape follows from
};

// Every tensor of the model, in file order of native-format documentation; nothing else may exist.
std::vector<TensorRequirement> RequiredTensors(const ModelSpec& spec);

// How a tensor of that name and shape is stored in a run or a file with quantized weights: matrices
// of experts and projections as `type`, an output head of its own as int8; routers, norms, biases,
// embeddings (a tied head with them) and the one row of a shared expert's gate keep their numbers.
Quantization QuantizationOf(std::string_view name, const std::vector<int64_t>& shape,
                            Quantization type);

// Source of weights. Single-threaded.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // The tensor of that name. The source has been checked against RequiredTensors(), so an absent
  // name or another shape is an internal error.
  // A tensor that is stored as integers comes widened to f32, which is exact.
  virtual Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) = 0;

  // The tensor as it is stored, where that is as integers of `type`; else nothing.
  virtual Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                              const std::vector<int64_t>& shape,
                                                              Quantization type) {
    (void)name, (void)shape, (void)type;
    return std::optional<QuantizedMatrix>();
  }

  // How the experts' and projections' matrices are stored; `--dtype auto` follows it.
  virtual Quantization StoredQuantization() const { return Quantization::kNone; }

  // The dtype most of the weight bytes have; `--dtype auto` follows it.
  virtual DType DominantDType() const = 0;
};

}  // namespace moeserve

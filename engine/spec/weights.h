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
#include "kernels/base/fp8_matrix.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/quantize.h"

namespace moeserve {

class WeightSource;

// One tensor that a specification requires.
struct TensorRequirement {
  std::string name;  // "blocks.0.attention.q.weight"
  std::vector<int64_t> shape;
  std::string follows_from;  // the configuration keys that determine the shape
  bool ids = false;          // the elements are integers, ids of experts, and no parameters
};

// Returns every tensor of the model, in the order in which the native format documents them. A
// checkpoint may contain no other tensor.
std::vector<TensorRequirement> RequiredTensors(const ModelSpec& spec);

// Returns whether a tensor belongs to ModelSpec::prediction. No answer depends on it.
inline bool IsOfPrediction(std::string_view name) {
  return name.starts_with(TensorPrefix(Stack::kPrediction));
}

// Returns the name of the table of biases of relative positions: of one layer, or of all.
std::string RelativeBiasName(const ModelSpec& spec, std::optional<int> layer);

// Returns InvalidArgument, with row and column, unless the rows of k ids in the table `name` have
// distinct ids in [0, experts).
absl::Status CheckExpertIds(std::string_view name, const std::vector<int32_t>& ids, int k,
                            int experts);

// Reads all tables of ids and returns the first error of CheckExpertIds().
absl::Status CheckTables(const ModelSpec& spec, WeightSource& weights);

// Returns how a tensor of this name and shape is stored when weights are quantized as `type`:
// matrices of experts and projections as `type`. With 4 bits, the projections of keys and values,
// the split and merge of heads and an untied LM head are int8 (int4) or int8-channel (int4-k).
// Routers, norms, biases, embeddings (a tied LM head included) and the gate of a shared expert, one
// row, stay unquantized.
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

  // Returns the matrix as stored if its elements are FP8 numbers, of which kFp8ScaleInputs adjacent
  // ones of a row have the same scale; otherwise nullopt.
  virtual Result<std::optional<Fp8Matrix>> GetFp8(std::string_view name,
                                                  const std::vector<int64_t>& shape) {
    (void)name, (void)shape;
    return std::optional<Fp8Matrix>();
  }

  // Returns the elements of a tensor of ids (TensorRequirement::ids). InvalidArgument if an integer
  // has more than 32 bits.
  virtual Result<std::vector<int32_t>> GetIds(std::string_view name,
                                              const std::vector<int64_t>& shape) {
    (void)shape;
    return absl::UnimplementedError("these weights have no table " + std::string(name));
  }

  // Returns how the matrices of experts and projections are stored; `--dtype auto` uses it.
  virtual Quantization StoredQuantization() const { return Quantization::kNone; }

  // Returns Internal with the file's name if files have lost bytes since they were opened. What was
  // read from them is then wrong. Must be called after the last access to tensors, and before what
  // was computed from them is used.
  virtual absl::Status Check() const { return absl::OkStatus(); }

  // Returns the dtype of the largest share of the weight bytes; `--dtype auto` uses it.
  virtual DType DominantDType() const = 0;
};

}  // namespace moeserve

// Matrices of integers as a folder stores them: a tensor of integers and one of scales.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/weights.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/quantize.h"
#include "model_loaders/files/safetensors.h"

namespace moeserve {

// One tensor of a file.
struct StoredTensor {
  std::string name;
  std::optional<ElementType> type;  // nothing: any type that weights may have
  std::vector<int64_t> shape;
  std::string follows_from;  // as TensorRequirement
};

// "blocks.0.attention.q.weight_scale" of "blocks.0.attention.q.weight".
std::string ScaleName(std::string_view weight);

// Tensors that stand for `tensor` in a folder of that quantization: itself, or integers (int8: I8
// [out, in]; int4: U8 [out, ceil(in / 2)], see QuantizedMatrix) and their scales (F16
// [out, groups]).
std::vector<StoredTensor> StoredTensors(const TensorRequirement& tensor, Quantization folder);

// InvalidArgument with row and column where an integer is out of range, a scale is not finite or
// the bits after an odd last column are not zero. `integers` and `scales` are what the message
// calls the two tensors.
absl::Status CheckQuantizedMatrix(const QuantizedMatrix& matrix, std::string_view integers,
                                  std::string_view scales);

// The matrix as f32, which is exact. ResourceExhausted.
Result<HostTensor> Dequantize(const QuantizedMatrix& matrix);

// Reads all integers and scales of a checked folder: the first fault that CheckQuantizedMatrix()
// finds. Nothing is read where no tensor is stored as integers.
absl::Status CheckQuantizedData(const ModelSpec& spec, WeightSource& weights);

}  // namespace moeserve

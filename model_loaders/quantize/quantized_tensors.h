// Stored form of quantized matrices: a tensor of integers and one of scales.
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
  std::optional<ElementType> type;  // absent: F32, F16 or BF16
  std::vector<int64_t> shape;
  std::string follows_from;  // as in TensorRequirement
};

// The scales of "blocks.0.attention.q.weight" are "blocks.0.attention.q.weight_scale".
std::string ScaleName(std::string_view weight);

// The tensors that store `tensor` in a folder of that quantization: itself, or integers (int8: I8
// [out, in]; int4: U8 [out, ceil(in / 2)], see QuantizedMatrix) and their scales (F16 [out,
// groups]).
std::vector<StoredTensor> StoredTensors(const TensorRequirement& tensor, Quantization folder);

// InvalidArgument with row and column if an integer is out of range, a scale is not finite or the
// bits after an odd last column are not zero. `integers` and `scales`: the names of the two tensors
// in messages.
absl::Status CheckQuantizedMatrix(const QuantizedMatrix& matrix, std::string_view integers,
                                  std::string_view scales);

// The matrix as f32, which is exact. ResourceExhausted if memory runs out.
Result<HostTensor> Dequantize(const QuantizedMatrix& matrix);

// Reads all integers and scales of a checked folder and returns the first fault that
// CheckQuantizedMatrix() finds. Reads nothing if no tensor is stored as integers.
absl::Status CheckQuantizedData(const ModelSpec& spec, WeightSource& weights);

}  // namespace moeserve

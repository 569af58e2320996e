// How files store quantized matrices: as a tensor of integers and a tensor of scales.
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

// One tensor of a safetensors file.
struct StoredTensor {
  std::string name;
  std::optional<ElementType> type;  // absent means F32, F16 or BF16; of ids, I32 or I64
  std::vector<int64_t> shape;
  std::string follows_from;  // the configuration keys that determine `shape`
  bool ids = false;          // TensorRequirement::ids
  bool units = false;        // TensorPlace::units
};

// Returns whether a tensor of the shape `found` is the stored one.
bool HasShape(const StoredTensor& stored, const std::vector<int64_t>& found);

// Returns the type in which a new file stores a tensor whose numbers have the type `numbers`.
inline ElementType NewTypeOf(const StoredTensor& stored, ElementType numbers) {
  return stored.ids ? ElementType::kI32 : stored.type.value_or(numbers);
}

// Returns the name of a matrix's scales, such as "blocks.0.attention.q.weight_scale" for
// "blocks.0.attention.q.weight".
std::string ScaleName(std::string_view weight);

// Returns the tensors that store `tensor` in a folder with quantization `folder`: the tensor
// itself, or its integers (int8: I8 [out, in]; int4: U8 [out, ceil(in / 2)], two columns per byte)
// and their scales (F16 [out, groups], one scale per row and group of columns).
std::vector<StoredTensor> StoredTensors(const TensorRequirement& tensor, Quantization folder);

// Returns InvalidArgument with row and column if an integer is out of range, if a scale is not
// finite, or if the unused bits after the last column of an int4 row are not zero. `integers` and
// `scales` are the names of the two tensors in error messages.
absl::Status CheckQuantizedMatrix(const QuantizedMatrix& matrix, std::string_view integers,
                                  std::string_view scales);

// Returns the matrix as f32, without rounding. ResourceExhausted if memory runs out.
Result<HostTensor> Dequantize(const QuantizedMatrix& matrix);

// Reads all integers and scales of a checked folder and returns the first error that
// CheckQuantizedMatrix() finds. Reads nothing if no tensor is stored as integers.
absl::Status CheckQuantizedData(const ModelSpec& spec, WeightSource& weights);

}  // namespace moeserve

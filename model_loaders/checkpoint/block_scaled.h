// Weights that files store as small floating-point numbers with one scale per block.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/base/fp8_matrix.h"
#include "kernels/base/host_tensor.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/checkpoint/stored_parts.h"

namespace moeserve {

// Returns the two tensors that store the floating-point tensor `place` in blocks: the numbers and
// their scales. InvalidArgument if the shape does not consist of whole blocks where the format
// requires it.
Result<std::vector<StoredTensor>> BlockScaledTensors(const TensorPlace& place,
                                                     const std::string& follows_from);

// The data of the two tensors. `scale_type` is U8 for MXFP4, else one that WeightType() accepts.
struct BlockScaledData {
  std::string_view values;
  std::string_view scales;
  ElementType scale_type = ElementType::kU8;
};

// Returns a copy of a part: bf16, which is exact, for MXFP4; f32 for FP8. `data` is that of
// the tensors of BlockScaledTensors(), with these shapes. ResourceExhausted if memory runs out.
Result<HostTensor> WidenBlockScaled(const StoredPart& part, const BlockScaledData& data,
                                    const std::vector<int64_t>& shape);

// Returns a part [rows, columns] of FP8 whose numbers are those of `data`, which must outlive it.
// Nothing if the part is transposed or if adjacent numbers that must have one scale (Fp8Matrix)
// have several.
std::optional<Fp8Matrix> KeptFp8(const StoredPart& part, const BlockScaledData& data,
                                 const std::vector<int64_t>& shape);

}  // namespace moeserve

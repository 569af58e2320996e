// Tensors of the model as parts of the tensors that a folder stores.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/quantize/quantized_tensors.h"

namespace moeserve {

struct StoredPart {
  StoredTensor stored;        // the whole tensor of the files
  int64_t first_element = 0;  // of the part; it is contiguous
};

// What the files must hold for `tensor`: one part of numbers, or integers and their scales, both
// whole. Internal if the family has no place for the tensor, or one that does not contain its
// shape.
Result<std::vector<StoredPart>> StoredParts(const CheckpointConfig& config,
                                            const TensorRequirement& tensor);

}  // namespace moeserve

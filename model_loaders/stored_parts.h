// Maps tensors of the model to parts of the tensors that a folder stores.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/quantize/quantized_tensors.h"

namespace moeserve {

struct StoredPart {
  StoredTensor stored;        // the whole tensor in the files
  int64_t first_element = 0;  // index of the part's first element; the part is contiguous
};

// Returns what the files must contain for `tensor`: one part of a floating-point tensor, or a whole
// tensor of integers and a whole tensor of scales. Internal if the family defines no location for
// the tensor, or one in which the tensor's shape does not fit.
Result<std::vector<StoredPart>> StoredParts(const CheckpointConfig& config,
                                            const TensorRequirement& tensor);

}  // namespace moeserve

// Maps tensors of the model to parts of the tensors that a folder stores.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/quantized_tensors.h"

namespace moeserve {

struct StoredPart {
  StoredTensor stored;        // the whole tensor in the files
  BlockFormat format = {};    // TensorPlace::format
  int64_t first_element = 0;  // index of the part's first element; in blocks, of widened elements
  // Distances in elements between adjacent rows, and between adjacent columns of a row; a tensor
  // with one dimension has rows of one element.
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  int64_t paired_rows = 0;  // TensorPlace::paired_rows
  int64_t group_rows = 0;   // TensorPlace::group_rows
  int64_t group_stride = 0;
  BlockOrder row_blocks = {};     // TensorPlace::row_blocks
  BlockOrder column_blocks = {};  // TensorPlace::column_blocks
  ElementFunction function = {};  // TensorPlace::function
  float add = 0.0f;               // TensorPlace::add
  // Whether the elements of the part are adjacent, in their order, and are the model's, so that no
  // copy is needed.
  bool contiguous = true;
};

// Returns what the files must contain for `tensor`: one part of a floating-point tensor, to which
// the whole tensor of scales is added if it is stored in blocks; or a whole tensor of integers and
// a whole tensor of scales. InvalidArgument if a shape does not consist of whole blocks. Internal
// if the family defines no location for the tensor, or one in which the tensor's shape does not
// fit.
Result<std::vector<StoredPart>> StoredParts(const CheckpointConfig& config,
                                            const TensorRequirement& tensor);

}  // namespace moeserve

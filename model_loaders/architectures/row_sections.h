// Matrices that files store as some of the rows of one tensor, in sections whose sizes follow from
// the settings of the layer.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/spec/block.h"
#include "model_loaders/architectures/name_table.h"

namespace moeserve {

// The rows of one matrix in the stored tensor: TensorPlace has members of these names.
struct RowSection {
  int64_t stored_rows = 0;
  int64_t first_row = 0;
  int64_t group_rows = 0;
  int64_t group_stride = 0;
};

// Returns whether SectionOf() is about this order.
bool IsRowSection(RowOrder order);

// Returns the rows of part `part` of a tensor of `block` that is stored in this order; nullopt if
// the block is of another kind or has no such part.
std::optional<RowSection> SectionOf(RowOrder order, int part, const BlockSpec& block);

}  // namespace moeserve

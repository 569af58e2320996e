// Numbers the routed blocks of a model, the rows of a token and the experts of all blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/spec/spec.h"

namespace moeserve {

struct RoutedBlock {
  int slot = 0;  // index in ModelSpec::blocks; a backend keeps the block's routing plans under it
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  int num_experts = 0;
  int sub_tokens = 1;         // rows per token
  int first_row = 0;          // index of the block's first row among all rows of a token
  uint32_t first_expert = 0;  // index of the block's expert 0 among the experts of all blocks
};

// Returns the settings of a routed block of `spec`.
inline const RoutedLayerSpec& RoutingOf(const ModelSpec& spec, const RoutedBlock& block) {
  return *spec.blocks[static_cast<size_t>(block.slot)].routing();
}

// Immutable; may be read by any thread.
struct RouteLayout {
  RouteLayout() = default;
  explicit RouteLayout(const ModelSpec& spec);

  std::vector<RoutedBlock> blocks;  // in execution order
  int rows_per_token = 0;
  uint32_t num_experts = 0;       // sum over all blocks
  std::vector<int> block_of_row;  // [rows_per_token] index into `blocks`
};

}  // namespace moeserve

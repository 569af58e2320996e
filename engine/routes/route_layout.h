// Numbers the routed blocks of a model, the rows of a token and the experts of all blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/spec/spec.h"

namespace moeserve {

// Returns the slot under which a backend keeps the routing plans of a block.
constexpr int PlanSlot(int layer, BlockKind block) {
  return 2 * layer + (block == BlockKind::kAttention ? 0 : 1);
}

struct RoutedBlock {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  int num_experts = 0;
  int sub_tokens = 1;         // rows per token
  int first_row = 0;          // index of the block's first row among all rows of a token
  uint32_t first_expert = 0;  // index of the block's expert 0 among the experts of all blocks
};

// Immutable; may be read by any thread.
struct RouteLayout {
  RouteLayout() = default;
  explicit RouteLayout(const ModelSpec& spec);

  // Returns the block's index in `blocks`, or -1 if the block is not routed.
  int IndexOf(int layer, BlockKind block) const {
    return block_of_layer[static_cast<size_t>(PlanSlot(layer, block))];
  }

  std::vector<RoutedBlock> blocks;  // by layer, attention before feed_forward
  int rows_per_token = 0;
  uint32_t num_experts = 0;         // sum over all blocks
  std::vector<int> block_of_row;    // [rows_per_token] index into `blocks`
  std::vector<int> block_of_layer;  // [2 * layers] index into `blocks` or -1, indexed by PlanSlot()
};

}  // namespace moeserve

// Numbering of the routed blocks of a model, of the rows of a token and of all experts.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/spec/spec.h"

namespace moeserve {

// The slot of a block's plans in a backend.
constexpr int PlanSlot(int layer, BlockKind block) {
  return 2 * layer + (block == BlockKind::kAttention ? 0 : 1);
}

struct RoutedBlock {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  int num_experts = 0;
  int sub_tokens = 1;         // rows of a token
  int first_row = 0;          // index of the first among all rows of a token
  uint32_t first_expert = 0;  // index of expert 0 among the experts of all blocks
};

// Immutable; any thread.
struct RouteLayout {
  RouteLayout() = default;
  explicit RouteLayout(const ModelSpec& spec);

  // Index into `blocks`; -1 where the block is not routed.
  int IndexOf(int layer, BlockKind block) const {
    return block_of_layer[static_cast<size_t>(PlanSlot(layer, block))];
  }

  std::vector<RoutedBlock> blocks;  // in order of layer, attention before feed_forward
  int rows_per_token = 0;
  uint32_t num_experts = 0;         // of all blocks
  std::vector<int> block_of_row;    // [rows_per_token]
  std::vector<int> block_of_layer;  // [2 * layers] by PlanSlot()
};

}  // namespace moeserve

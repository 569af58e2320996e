#include "engine/routes/route_layout.h"

namespace moeserve {

RouteLayout::RouteLayout(const ModelSpec& spec) {
  for (int slot = 0; slot < spec.num_blocks(); ++slot) {
    const BlockSpec& block = spec.blocks[static_cast<size_t>(slot)];
    const RoutedLayerSpec* routing = block.routing();
    if (routing == nullptr) continue;
    const int index = static_cast<int>(blocks.size());
    blocks.push_back({.slot = slot,
                      .layer = block.layer,
                      .block = block.kind(),
                      .num_experts = routing->num_experts,
                      .sub_tokens = routing->split.heads,
                      .first_row = rows_per_token,
                      .first_expert = num_experts});
    rows_per_token += routing->split.heads;
    num_experts += static_cast<uint32_t>(routing->num_experts);
    block_of_row.resize(static_cast<size_t>(rows_per_token), index);
  }
}

}  // namespace moeserve

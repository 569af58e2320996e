#include "engine/routes/route_layout.h"

namespace moeserve {

RouteLayout::RouteLayout(const ModelSpec& spec) {
  const auto add = [&](int layer, BlockKind block, const std::optional<RoutedLayerSpec>& routing) {
    if (!routing.has_value()) {
      block_of_layer.push_back(-1);
      return;
    }
    const int index = static_cast<int>(blocks.size());
    block_of_layer.push_back(index);
    blocks.push_back({.layer = layer,
                      .block = block,
                      .num_experts = routing->num_experts,
                      .sub_tokens = routing->split.heads,
                      .first_row = rows_per_token,
                      .first_expert = num_experts});
    rows_per_token += routing->split.heads;
    num_experts += static_cast<uint32_t>(routing->num_experts);
    block_of_row.resize(static_cast<size_t>(rows_per_token), index);
  };
  for (int l = 0; l < spec.num_layers(); ++l) {
    add(l, BlockKind::kAttention, spec.layers[l].attention.routing);
    add(l, BlockKind::kFeedForward, spec.layers[l].feed_forward.routing);
  }
}

}  // namespace moeserve

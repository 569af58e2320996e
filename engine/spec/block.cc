#include "engine/spec/block.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/spec/spec.h"

namespace moeserve {

const RoutedLayerSpec* BlockSpec::routing() const {
  const auto of = [](const std::optional<RoutedLayerSpec>& routing) {
    return routing.has_value() ? &*routing : nullptr;
  };
  return std::visit(
      [&](const auto& m) -> const RoutedLayerSpec* {
        const auto& settings = SettingsOf(m);
        if constexpr (requires { settings.value_routing; }) {
          return of(settings.routed() ? settings.routing : settings.value_routing);
        } else if constexpr (requires { settings.routing; }) {
          return of(settings.routing);
        } else {
          return nullptr;
        }
      },
      mixer);
}

int RoutedLayerSpec::BodyOf(int expert) const {
  if (expert >= num_places()) return -1;
  const std::vector<int>& replaced = null_experts.replaced;
  const auto next = std::ranges::lower_bound(replaced, expert);
  if (next != replaced.end() && *next == expert) return -1;
  return expert - static_cast<int>(next - replaced.begin());
}

bool RoutedLayerSpec::IsConstant(int expert) const {
  if (expert >= num_places()) return expert >= num_experts - null_experts.constant;
  return BodyOf(expert) < 0;
}

std::vector<int> RoutedLayerSpec::PlaceWidths() const {
  std::vector<int> out;
  for (int e = 0; e < num_places(); ++e) {
    const int body = BodyOf(e);
    out.push_back(body < 0 ? 0 : widths[static_cast<size_t>(body)]);
  }
  return out;
}

std::string BlockSpec::name() const {
  return Concat(TensorPrefix(stack), "blocks.", layer, '.', Name(kind()));
}

NormPlacement NormPlacementOf(const ModelSpec& spec, const BlockSpec& block) {
  return block.residual.norm_placement.value_or(spec.norm.placement);
}

double ResidualScaleOf(const ModelSpec& spec, const BlockSpec& block) {
  return block.residual.scale.value_or(spec.residual_scale);
}

int ModelSpec::Find(int layer, BlockKind kind) const {
  const auto first = std::ranges::lower_bound(blocks, layer, {}, &BlockSpec::layer);
  for (auto block = first; block != blocks.end() && block->layer == layer; ++block) {
    if (block->kind() == kind) return static_cast<int>(block - blocks.begin());
  }
  return -1;
}

const BlockSpec* ModelSpec::token_mixer(int layer) const {
  const auto block = std::ranges::find_if(blocks, [&](const BlockSpec& b) {
    return b.layer == layer && b.kind() != BlockKind::kFeedForward &&
           b.kind() != BlockKind::kCrossAttention;
  });
  return block == blocks.end() ? nullptr : &*block;
}

const BlockSpec* ModelSpec::FindBlock(int layer, BlockKind kind) const {
  const int block = Find(layer, kind);
  return block < 0 ? nullptr : &blocks[static_cast<size_t>(block)];
}

const AttentionSpec& ModelSpec::attention(int layer) const {
  const int block = Find(layer, BlockKind::kAttention);
  MOESERVE_CHECK(block >= 0, "the layer has an attention block");
  return std::get<AttentionSpec>(blocks[static_cast<size_t>(block)].mixer);
}
AttentionSpec& ModelSpec::attention(int layer) {
  return const_cast<AttentionSpec&>(std::as_const(*this).attention(layer));
}

const FeedForwardSpec& ModelSpec::feed_forward(int layer) const {
  const int block = Find(layer, BlockKind::kFeedForward);
  MOESERVE_CHECK(block >= 0, "the layer has a feed-forward block");
  return std::get<FeedForwardSpec>(blocks[static_cast<size_t>(block)].mixer);
}
FeedForwardSpec& ModelSpec::feed_forward(int layer) {
  return const_cast<FeedForwardSpec&>(std::as_const(*this).feed_forward(layer));
}

void ModelSpec::AddLayer(Mixer only) {
  blocks.push_back({.mixer = std::move(only), .layer = num_layers()});
}

void ModelSpec::AddLayer(Mixer token_mixer, FeedForwardSpec feed_forward) {
  const int index = num_layers();
  blocks.push_back({.mixer = std::move(token_mixer), .layer = index});
  blocks.push_back({.mixer = std::move(feed_forward), .layer = index});
}

void ModelSpec::AddLayer(LayerSpec layer) {
  Mixer first =
      layer.token_mixer.has_value() ? std::move(*layer.token_mixer) : std::move(layer.attention);
  if (layer.one_block) {
    AddLayer(std::move(first));
  } else {
    AddLayer(std::move(first), std::move(layer.feed_forward));
  }
}

void ModelSpec::AddLayers(int count, const LayerSpec& layer) {
  for (int i = 0; i < count; ++i) AddLayer(layer);
}

}  // namespace moeserve

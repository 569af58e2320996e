#include "server/bench/bench_work.h"

#include <string>

#include "engine/spec/weights.h"

namespace moeserve::server {

int64_t ExpertParameters(const ModelSpec& spec, int layer, BlockKind block, int expert) {
  if (block == BlockKind::kAttention) {
    const AttentionSpec& a = spec.attention(layer);
    return int64_t{2} * a.num_kv_heads * a.head_dim * spec.hidden_size;
  }
  const FeedForwardSpec& f = spec.feed_forward(layer);
  const RoutedLayerSpec& routing = *f.routing;
  if (expert >= routing.num_bodies()) return 0;
  const int64_t matrices = f.expert.form == ExpertForm::kGated ? 3 : 2;
  const int64_t row =
      routing.latent_width > 0 ? routing.latent_width : spec.hidden_size / routing.split.heads;
  return matrices * f.expert.depth * routing.widths[expert] * row;
}

void RoutedWork::Add(int layer, BlockKind block, const RoutingPlan& plan) {
  for (int e = 0; e < plan.num_experts; ++e) {
    const int64_t rows = plan.expert_offsets[e + 1] - plan.expert_offsets[e];
    if (rows == 0) continue;
    const int64_t parameters = ExpertParameters(spec_, layer, block, e);
    if (parameters == 0) continue;  // an expert without matrices
    ++experts_;
    parameters_ += parameters;
    products_ += rows * parameters;
    if (block == BlockKind::kAttention) {
      heads_[layer] += rows * spec_.attention(layer).num_kv_heads;
    }
  }
}

int64_t RoutedWork::attention_heads(int layer) const { return heads_[layer]; }

int64_t FixedProducts(const ModelSpec& spec) {
  int64_t products = 0;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const bool router = t.name.find(".router.") != std::string::npos;
    const bool expert = !router && t.name.find(".experts.") != std::string::npos;
    if (t.shape.size() != 2 || expert || t.ids || t.name.starts_with("embed") ||
        t.name == "head.weight") {
      continue;
    }
    products += t.shape[0] * t.shape[1];
  }
  // A router scores every sub-token of a token separately.
  for (const BlockSpec& block : spec.blocks) {
    if (block.routing() == nullptr || block.kind() != BlockKind::kFeedForward) continue;
    const RoutedLayerSpec& r = *block.routing();
    const int64_t width = spec.hidden_size / r.split.heads;
    const int64_t once = r.score.kind == ScoreKind::kDot
                             ? int64_t{r.num_experts} * width
                             : int64_t{r.score.dim} * (width + r.num_experts);
    products += once * (r.split.heads - 1);
    // So do the projections around the experts.
    products += int64_t{2} * r.latent_width * width * (r.split.heads - 1);
  }
  return products;
}

int64_t HeadProducts(const ModelSpec& spec) { return int64_t{spec.vocab_size} * spec.hidden_size; }

double VisiblePositions::Mean(std::optional<int> window) const {
  if (!window || *window >= last) return 0.5 * static_cast<double>(first + last);
  if (*window <= first) return *window;
  const auto count = static_cast<double>(last - first + 1);
  const auto below = static_cast<double>(*window - first);
  return *window - 0.5 * below * (below + 1.0) / count;
}

double CacheBytesRead(const ModelSpec& spec, KvCacheType cache, const VisiblePositions& visible) {
  const int64_t scale = cache == KvCacheType::kInt8 ? sizeof(float) : 0;
  const std::vector<KvLayerShape> shapes = CacheShapes(spec);
  double bytes = 0;
  for (int b = 0; b < spec.num_blocks(); ++b) {
    const AttentionSpec* attention = spec.blocks[static_cast<size_t>(b)].attention();
    if (attention == nullptr) continue;
    const KvLayerShape& shape = shapes[static_cast<size_t>(CacheLayer(spec, b))];
    const int vectors = shape.latent_dim > 0 ? 1 : 2;  // keys alone, or keys and values
    const int64_t position =
        vectors * shape.num_kv_heads * (shape.head_dim * ElementBytes(cache) + scale);
    bytes += static_cast<double>(position) * visible.Mean(attention->window);
  }
  return bytes;
}

StepOperations Operations(const ModelSpec& spec, const RoutedWork& work, int64_t tokens,
                          const VisiblePositions& visible) {
  StepOperations operations;
  operations.matrices =
      2.0 * (static_cast<double>(work.products()) +
             static_cast<double>(tokens) * static_cast<double>(FixedProducts(spec)));
  for (const BlockSpec& block : spec.blocks) {
    if (block.attention() == nullptr) continue;
    const AttentionSpec& a = *block.attention();
    const int64_t heads = a.routed() ? work.attention_heads(block.layer) : tokens * a.num_heads;
    // query-key scores and weighted values
    const int64_t width =
        a.latent.has_value() ? 2 * a.latent->rank + a.latent->rope_dim : 2 * int64_t{a.head_dim};
    operations.attention += 2.0 * visible.Mean(a.window) * static_cast<double>(heads * width);
  }
  return operations;
}

}  // namespace moeserve::server

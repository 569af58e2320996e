#include "server/bench/bench_work.h"

namespace moeserve::server {

void RoutedWork::Add(int layer, BlockKind block, const RoutingPlan& plan) {
  for (int e = 0; e < plan.num_experts; ++e) {
    const int64_t rows = plan.expert_offsets[e + 1] - plan.expert_offsets[e];
    if (rows == 0) continue;
    const int64_t parameters = ExpertMacs(spec_, layer, block, e);  // one for each parameter
    if (parameters == 0) continue;                                  // an expert without matrices
    ++experts_;
    parameters_ += parameters;
    products_ += rows * parameters;
    if (block == BlockKind::kAttention) {
      heads_[layer] += rows * spec_.attention(layer).num_kv_heads;
    }
  }
}

int64_t RoutedWork::attention_heads(int layer) const { return heads_[layer]; }

double CacheBytesRead(const ModelSpec& spec, KvCacheType cache, const VisiblePositions& visible) {
  const int64_t scale = cache == KvCacheType::kInt8 ? sizeof(float) : 0;
  const std::vector<KvLayerShape> shapes = CacheShapes(spec);
  double bytes = 0;
  for (int b = 0; b < spec.num_blocks(); ++b) {
    const AttentionSpec* attention = spec.blocks[static_cast<size_t>(b)].attention();
    if (attention == nullptr) continue;
    const KvLayerShape& shape = shapes[static_cast<size_t>(CacheLayer(spec, b))];
    const auto vector = [&](int elements) { return elements * ElementBytes(cache) + scale; };
    const int64_t values = shape.latent_dim > 0 ? 0 : vector(shape.value_dim());
    const int64_t position = shape.num_kv_heads * (vector(shape.head_dim) + values);
    bytes +=
        static_cast<double>(position) * visible.Mean(attention->window, attention->window_kind);
  }
  return bytes;
}

double StateBytesMoved(const ModelSpec& spec) {
  double bytes = 0;
  for (const StateShape& shape : StateShapes(spec)) {
    bytes += 2.0 * static_cast<double>(shape.floats()) * sizeof(float);
  }
  return bytes;
}

StepOperations Operations(const ModelSpec& spec, const RoutedWork& work, int64_t tokens,
                          const VisiblePositions& visible) {
  StepOperations operations;
  operations.matrices = 2.0 * (static_cast<double>(work.products()) +
                               static_cast<double>(tokens) * static_cast<double>(FixedMacs(spec)));
  for (const BlockSpec& block : spec.blocks) {
    if (block.attention() == nullptr) continue;
    const AttentionSpec& a = *block.attention();
    const int64_t times = a.routed() ? work.attention_heads(block.layer) / a.num_kv_heads : tokens;
    operations.attention +=
        2.0 * visible.Mean(a.window, a.window_kind) * static_cast<double>(times * MacsPerKey(a));
  }
  return operations;
}

}  // namespace moeserve::server

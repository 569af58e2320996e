// A model with random weights in packed files, for tests and measurements of tiers.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/memory/paged_pool.h"
#include "engine/model/model.h"
#include "engine/step/batch.h"
#include "kernels/registry.h"
#include "server/bench/synthetic_model.h"

namespace moeserve::testing {

struct TierShape {
  int layers = 4;
  int experts = 24;
  int chosen = 4;
  int width = 640;  // of experts, gated, on rows of 512
};

inline ModelSpec TierSpec(const TierShape& shape) {
  ModelSpec spec;
  spec.vocab_size = 512;
  spec.hidden_size = 512;
  spec.max_position_embeddings = 4096;
  AttentionSpec attention;
  attention.num_heads = attention.num_kv_heads = 4;
  attention.head_dim = 64;
  attention.scale = 0.125;
  RoutedLayerSpec routing;
  routing.num_experts = shape.experts;
  routing.widths.assign(static_cast<size_t>(shape.experts), shape.width);
  routing.select.k = shape.chosen;
  routing.renormalize = true;
  FeedForwardSpec feed_forward;
  feed_forward.routing = routing;
  spec.AddLayers(shape.layers, {attention, feed_forward});
  return spec;
}

// A model, in bf16, whose weights are read from packed files in `folder`.
class TierModel {
 public:
  static Result<std::unique_ptr<TierModel>> Load(const ModelSpec& spec,
                                                 const std::filesystem::path& folder,
                                                 const TierOptions& tiers, int threads = 2) {
    auto out = std::make_unique<TierModel>();
    MOESERVE_ASSIGN_OR_RETURN(out->backend_, CreateBackend({.device = "cpu", .threads = threads}));
    MOESERVE_ASSIGN_OR_RETURN(
        const std::unique_ptr<PackedCache> cache,
        PackedCache::Open({.folder = folder, .place = "/tiers", .state = "1", .warn = {}},
                          *out->backend_));
    const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
    const ModelOptions options{.compute = DType::kBF16, .tiers = tiers};
    MOESERVE_ASSIGN_OR_RETURN(out->model_,
                              Model::Create(spec, options, *weights, *out->backend_, cache.get()));
    MOESERVE_ASSIGN_OR_RETURN(
        out->cache_, out->backend_->NewKvCache(CacheShapes(spec), KvCacheType::kBF16, {64}));
    for (int32_t page = 0; page < 64; ++page) out->pages_.push_back(page);
    return out;
  }

  // Runs a step with the next tokens of the only sequence. Returns the logits of the last one.
  // `given`: the routes of each block; empty: the routers choose.
  std::vector<float> Step(int tokens, const std::vector<const GivenRoutes*>& given = {}) {
    const ModelSpec& spec = model_->spec();
    Batch batch;
    batch.page_tables = {pages_};
    for (int i = 0; i < tokens; ++i, ++position_) {
      batch.tokens.push_back((position_ * 37 + 11) % spec.vocab_size);
      batch.positions.push_back(position_ % 1000);
      batch.sequence.push_back(0);
      batch.phase.push_back(tokens > 1 ? Phase::kPrefill : Phase::kDecode);
    }
    batch.logit_rows = {tokens - 1};
    batch.given = given;
    std::vector<float> logits(static_cast<size_t>(spec.vocab_size));
    model_->Forward(batch, *cache_, {}, {.logits = logits});
    return logits;
  }

  Model& model() { return *model_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvCacheStorage> cache_;
  std::vector<int32_t> pages_;
  int position_ = 0;
};

}  // namespace moeserve::testing

// Multi-head latent attention ("DeepSeek-V2", section 2.1).
#pragma once

#include <memory>

#include "engine/layers/branch.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// The cache holds one latent vector per token, from which keys and values of all heads could be
// computed. Instead, each head's query is mapped into the space of latent vectors (the key
// projection is "absorbed"), so attention reads the cache directly, with one kv head for all query
// heads; the head's value projection is applied to the weighted sum. Immutable after loading.
class LatentAttention : public Branch {
 public:
  // The layer's attention spec has `latent`.
  static Result<std::unique_ptr<LatentAttention>> Load(LoadContext& load, const ModelSpec& model,
                                                       int block);

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

  const float* out_bias() const override {
    return out_bias_ == nullptr ? nullptr : static_cast<const float*>(out_bias_->data());
  }

 private:
  // Returns the queries [T, H * head_dim], f32, before rotation, and writes the latent vectors and
  // rotated key parts before norm and rotation to `latent` [T, rank + rope_dim], f32.
  RowsView Project(StepContext& ctx, const RowsView& x, const RowsView& latent) const;
  // Returns the queries in the space of cached vectors [T, H * (rank + rope_dim)], f32.
  RowsView Absorb(StepContext& ctx, const RowsView& query) const;

  int layer_ = 0;  // of the KV cache
  int heads_ = 0;
  AttentionSpec spec_;
  RopeSettings query_rope_, key_rope_;
  std::unique_ptr<LinearBank> query_;       // [H * head_dim] from d, or from query_rank
  std::unique_ptr<LinearBank> query_down_;  // [query_rank] from d; null without query_rank
  std::unique_ptr<LinearBank> latent_;      // [rank + rope_dim] from d
  std::unique_ptr<NormBank> query_norm_;    // null without query_rank
  std::unique_ptr<NormBank> latent_norm_;
  std::unique_ptr<LinearBank> absorbed_;  // one matrix [rank, head_dim - rope_dim] per head
  std::unique_ptr<LinearBank> value_;     // one matrix [value_dim, rank] per head
  std::unique_ptr<LinearBank> gate_;      // null if there is none
  std::unique_ptr<LinearBank> output_;    // [d] from H * value_dim
  std::unique_ptr<DeviceBuffer> out_bias_;
};

}  // namespace moeserve

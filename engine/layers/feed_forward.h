// The feed-forward half of a decoder layer: dense, or routed with an optional shared expert.
#pragma once

#include <memory>

#include "engine/layers/branch.h"
#include "engine/layers/routed/routed_layer.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Immutable after loading.
class FeedForward : public Branch {
 public:
  static Result<std::unique_ptr<FeedForward>> Load(LoadContext& load, const ModelSpec& model,
                                                   int block);

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

  bool TakesNorm() const override { return routed_ != nullptr && routed_->TakesNorm(); }
  const RoutedLayer* routed() const override { return routed_.get(); }

  const float* out_bias() const override {
    return out_bias_ == nullptr ? nullptr : static_cast<const float*>(out_bias_->data());
  }

 private:
  // The dense network, or the shared expert if routed_ is set.
  std::unique_ptr<FeedForwardExperts> dense_;
  std::unique_ptr<LinearBank> shared_gate_;
  bool late_ = false;  // FeedForwardSpec::late_experts
  // Null without FeedForwardSpec::shared_norms.
  std::unique_ptr<NormBank> shared_norm_, shared_output_norm_, experts_norm_;
  std::unique_ptr<RoutedLayer> routed_;  // null if the block is dense
  std::unique_ptr<DeviceBuffer> out_bias_;
};

}  // namespace moeserve

// The feed-forward half of a decoder layer: dense, or routed with an optional shared expert.
#pragma once

#include <memory>

#include "engine/layers/load_weights.h"
#include "engine/layers/routed/routed_layer.h"
#include "engine/layers/step_context.h"

namespace moeserve {

// Immutable after loading.
class FeedForward {
 public:
  static Result<std::unique_ptr<FeedForward>> Load(LoadContext& load, int layer,
                                                   const ModelSpec& model);

  // `x` [T, d] in the activation type; `output` [T, d] f32.
  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const;

  const RoutedLayer* routed() const { return routed_.get(); }  // null: dense

 private:
  std::unique_ptr<FeedForwardExperts> dense_;  // dense, or the shared expert beside routed_
  std::unique_ptr<LinearBank> shared_gate_;
  std::unique_ptr<RoutedLayer> routed_;
};

}  // namespace moeserve

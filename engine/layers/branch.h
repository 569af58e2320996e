// What a block computes between its norm and the addition to the residual stream.
#pragma once

#include "engine/step/step_context.h"

namespace moeserve {

class RoutedLayer;

// A model is a list of blocks: norm, branch, residual. Attention and feed-forward are branches.
// Immutable after loading.
class Branch {
 public:
  virtual ~Branch() = default;
  // Writes the branch's output, without the out-bias, to `output` [T, d] f32, or leaves its last
  // sum to the caller (StepContext::left_sum). `x` [T, d] is in the activation type.
  virtual void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const = 0;
  // Returns whether the first operation of Forward() is a Route() or Linear() of `x` that takes
  // StepContext::left_norm.
  virtual bool TakesNorm() const { return false; }
  // Returns the routed layer; null if there is none.
  virtual const RoutedLayer* routed() const { return nullptr; }
  // Returns the out-bias [d] in device memory; null if there is none.
  virtual const float* out_bias() const { return nullptr; }
};

}  // namespace moeserve

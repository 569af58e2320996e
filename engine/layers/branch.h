// What one block of a model computes between its norm and its residual.
#pragma once

#include "engine/layers/step_context.h"

namespace moeserve {

// A model is a list of blocks: norm, branch, residual. Attention and feed-forward are branches.
// Immutable after loading.
class Branch {
 public:
  virtual ~Branch() = default;
  // `x` [T, d] in the activation type; `output` [T, d] f32, the out-bias not yet added.
  virtual void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const = 0;
  // [d] on the device, or null: none.
  virtual const float* out_bias() const { return nullptr; }
};

}  // namespace moeserve

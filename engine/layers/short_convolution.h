// The gated short convolution of a decoder layer (LFM2), which takes the place of an attention.
#pragma once

#include <memory>

#include "engine/layers/branch.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// A projection to b, c and x, ShortConvolutionArgs, and a projection back. Immutable after loading.
class ShortConvolution : public Branch {
 public:
  static Result<std::unique_ptr<ShortConvolution>> Load(LoadContext& load, const ModelSpec& model,
                                                        int block);

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

 private:
  int state_ = 0;  // index of the block's states
  int taps_ = 1;
  StackedLinear projection_;              // output columns: b, c, x
  std::unique_ptr<DeviceBuffer> weight_;  // [taps, d]
  std::unique_ptr<DeviceBuffer> bias_;    // [d]; null if there is none
  std::unique_ptr<LinearBank> output_;
};

}  // namespace moeserve

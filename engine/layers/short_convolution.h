// The gated short convolution of a decoder layer (LFM2), which takes the place of an attention.
#pragma once

#include <memory>
#include <vector>

#include "engine/layers/branch.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// The weights of ShortConvolutionArgs. Immutable after loading.
struct Convolution {
  int taps = 1;
  std::unique_ptr<DeviceBuffer> weight;  // [taps, cols]
  std::unique_ptr<DeviceBuffer> bias;    // [cols]; null if there is none

  // Loads the tensors of `parts`, each of which has out_features columns: prefix + ".weight"
  // [columns, taps] and, with a bias, prefix + ".bias". Only a single part may have a bias.
  static Result<Convolution> Load(LoadContext& load, const std::vector<LinearPart>& parts,
                                  int taps);
  // Runs the convolution of the states' block `block`; `gated` is that of ShortConvolutionArgs.
  void Run(StepContext& ctx, int block, bool gated, const RowsView& input,
           const RowsView& output) const;
};

// A projection to b, c and x, ShortConvolutionArgs, and a projection back. Immutable after loading.
class ShortConvolution : public Branch {
 public:
  static Result<std::unique_ptr<ShortConvolution>> Load(LoadContext& load, const ModelSpec& model,
                                                        int block);

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

 private:
  int state_ = 0;             // index of the block's states
  StackedLinear projection_;  // output columns: b, c, x
  Convolution convolution_;
  std::unique_ptr<LinearBank> output_;
};

}  // namespace moeserve

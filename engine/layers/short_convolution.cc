#include "engine/layers/short_convolution.h"

#include <string>
#include <vector>

namespace moeserve {

Result<std::unique_ptr<ShortConvolution>> ShortConvolution::Load(LoadContext& load,
                                                                 const ModelSpec& model,
                                                                 int block) {
  auto layer = std::make_unique<ShortConvolution>();
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const std::string prefix = block_spec.name();
  const ShortConvolutionSpec& spec = *block_spec.short_convolution();
  const int d = model.hidden_size;
  layer->state_ = StateIndex(model, block);
  layer->taps_ = spec.taps;
  MOESERVE_ASSIGN_OR_RETURN(layer->projection_,
                            StackedLinear::Load(load, d,
                                                {{prefix + ".b", d, spec.bias},
                                                 {prefix + ".c", d, spec.bias},
                                                 {prefix + ".x", d, spec.bias}}));
  MOESERVE_ASSIGN_OR_RETURN(const HostTensor weight,
                            load.source.Get(prefix + ".conv.weight", {d, spec.taps}));
  std::vector<float> by_tap;
  for (int tap = 0; tap < spec.taps; ++tap) {
    for (int64_t i = 0; i < d; ++i) by_tap.push_back(ElementAsF32(weight, i * spec.taps + tap));
  }
  MOESERVE_ASSIGN_OR_RETURN(layer->weight_, load.backend.Upload(by_tap));
  if (spec.bias) {
    MOESERVE_ASSIGN_OR_RETURN(layer->bias_, LoadVector(load, prefix + ".conv.bias", d));
  }
  MOESERVE_ASSIGN_OR_RETURN(layer->output_, LoadLinear(load, d, {{prefix + ".o", d, spec.bias}}));
  return layer;
}

void ShortConvolution::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const RowsView projected = ctx.workspace.Take(x.rows, 3 * x.cols, DType::kF32);
  projection_.Run(ctx.backend, x, projected);
  const RowsView mixed = ctx.workspace.Take(x.rows, x.cols, ctx.activation);
  ctx.backend.ShortConvolution(
      {.states = ctx.batch.states.storage,
       .block = state_,
       .taps = taps_,
       .weight = static_cast<const float*>(weight_->data()),
       .bias = bias_ == nullptr ? nullptr : static_cast<const float*>(bias_->data()),
       .input = projected,
       .output = mixed});
  ctx.backend.Linear({.bank = output_.get(), .input = mixed, .output = output});
}

}  // namespace moeserve

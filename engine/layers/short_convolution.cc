#include "engine/layers/short_convolution.h"

#include <string>
#include <vector>

namespace moeserve {

Result<Convolution> Convolution::Load(LoadContext& load, const std::vector<LinearPart>& parts,
                                      int taps) {
  Convolution convolution;
  convolution.taps = taps;
  std::vector<HostTensor> weights;
  for (const LinearPart& part : parts) {
    MOESERVE_ASSIGN_OR_RETURN(weights.emplace_back(),
                              load.source.Get(part.prefix + ".weight", {part.out_features, taps}));
    if (!part.bias) continue;
    MOESERVE_ASSIGN_OR_RETURN(convolution.bias,
                              LoadVector(load, part.bias_name(), part.out_features));
  }
  std::vector<float> by_tap;
  for (int tap = 0; tap < taps; ++tap) {
    for (const HostTensor& weight : weights) {
      for (int64_t i = 0; i < weight.shape[0]; ++i) {
        by_tap.push_back(ElementAsF32(weight, i * taps + tap));
      }
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(convolution.weight, load.backend.Upload(by_tap));
  return convolution;
}

void Convolution::Run(StepContext& ctx, int block, bool gated, const RowsView& input,
                      const RowsView& output) const {
  ctx.backend.ShortConvolution(
      {.states = ctx.batch.states.storage,
       .block = block,
       .gated = gated,
       .taps = taps,
       .weight = static_cast<const float*>(weight->data()),
       .bias = bias == nullptr ? nullptr : static_cast<const float*>(bias->data()),
       .input = input,
       .output = output});
}

Result<std::unique_ptr<ShortConvolution>> ShortConvolution::Load(LoadContext& load,
                                                                 const ModelSpec& model,
                                                                 int block) {
  auto layer = std::make_unique<ShortConvolution>();
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const std::string prefix = block_spec.name();
  const ShortConvolutionSpec& spec = *block_spec.short_convolution();
  const int d = model.hidden_size;
  layer->state_ = StateIndex(model, block);
  MOESERVE_ASSIGN_OR_RETURN(layer->projection_,
                            StackedLinear::Load(load, d,
                                                {{prefix + ".b", d, spec.bias},
                                                 {prefix + ".c", d, spec.bias},
                                                 {prefix + ".x", d, spec.bias}}));
  MOESERVE_ASSIGN_OR_RETURN(layer->convolution_,
                            Convolution::Load(load, {{prefix + ".conv", d, spec.bias}}, spec.taps));
  MOESERVE_ASSIGN_OR_RETURN(layer->output_, LoadLinear(load, d, {{prefix + ".o", d, spec.bias}}));
  return layer;
}

void ShortConvolution::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const RowDivision& division = ctx.division;
  const RowsView projected = ctx.TakeGathered(x.rows, 3 * x.cols, DType::kF32);
  projection_.Run(ctx.backend, division.Own(x), division.Own(projected));
  division.Gather(ctx.backend, projected);
  const RowsView mixed = ctx.workspace.Take(x.rows, x.cols, ctx.activation);
  convolution_.Run(ctx, state_, true, projected, mixed);
  ctx.backend.Linear(
      {.bank = output_.get(), .input = division.Own(mixed), .output = division.Own(output)});
  division.Gather(ctx.backend, output);
}

}  // namespace moeserve

// The inputs that layers have beside the residual stream (LayerInputSpec).
#pragma once

#include <memory>
#include <vector>

#include "engine/spec/spec.h"
#include "engine/step/step_context.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Immutable after loading.
class LayerInputs {
 public:
  // `spec` must have layer inputs.
  static Result<std::unique_ptr<LayerInputs>> Load(LoadContext& load, const ModelSpec& spec);

  // Returns the inputs of all layers of the step's tokens, f32 [T, layers * width] in the
  // workspace. `embeddings` [T, d] f32 are the stream before the first layer.
  RowsView Compute(StepContext& ctx, const RowsView& embeddings) const;

  // Adds to the stream `x` [T, d] f32 what a layer makes of its part of `inputs`.
  void Add(StepContext& ctx, const RowsView& inputs, int layer, const RowsView& x) const;

 private:
  struct Layer {
    std::unique_ptr<LinearBank> gate, down;
    std::unique_ptr<NormBank> norm;
  };

  LayerInputSpec spec_;
  std::unique_ptr<EmbeddingTable> table_;  // rows of the inputs of all layers
  std::unique_ptr<LinearBank> projection_;
  std::unique_ptr<NormBank> norm_;
  std::vector<Layer> layers_;
};

}  // namespace moeserve

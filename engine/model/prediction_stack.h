// The layers that draft tokens (ModelSpec::prediction).
#pragma once

#include <memory>

#include "engine/model/block_stack.h"
#include "engine/spec/spec.h"
#include "engine/step/step_context.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Immutable after loading, except for the report of a step.
class PredictionStack {
 public:
  // `spec` is the specification of the prediction layers and outlives the stack.
  PredictionStack(const ModelSpec& spec, DType compute)
      : compute_(compute), stack_(spec, compute) {}

  // `tokens` is the model's table of embeddings and outlives the stack.
  absl::Status Load(const LoadContext& load, const EmbeddingTable& tokens);

  // Runs the layers. `hidden` [T, d] f32 are the rows that come before the step's tokens, after the
  // final norm of the stack that computed them. Writes the residual stream after the last layer to
  // `x` [T, d] f32.
  void Run(StepContext& ctx, const RowsView& hidden, const RowsView& x);

  // Writes `x` after the final norm to `to` [T, d] f32.
  void Normalize(Backend& backend, const RowsView& x, const RowsView& to) const {
    stack_.Finish(backend, x, to);
  }

  BlockStack& blocks() { return stack_; }

 private:
  const DType compute_;
  BlockStack stack_;
  std::unique_ptr<NormBank> hidden_norm_;
  std::unique_ptr<LinearBank> join_;  // [d, 2 d]
};

}  // namespace moeserve

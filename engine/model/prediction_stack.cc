#include "engine/model/prediction_stack.h"

#include <string>

namespace moeserve {

absl::Status PredictionStack::Load(const LoadContext& load, const EmbeddingTable& tokens) {
  MOESERVE_RETURN_IF_ERROR(stack_.Load(load, nullptr, &tokens));
  LoadContext own = load;
  const std::string prefix = TensorPrefix(Stack::kPrediction);
  const int d = stack_.spec().hidden_size;
  MOESERVE_ASSIGN_OR_RETURN(hidden_norm_, LoadRowNorm(own, prefix + "hidden_norm", d));
  MOESERVE_ASSIGN_OR_RETURN(join_, LoadLinear(own, 2 * d, {{prefix + "join", d, false}}));
  return absl::OkStatus();
}

void PredictionStack::Run(StepContext& ctx, const RowsView& hidden, const RowsView& x) {
  Backend& backend = ctx.backend;
  const int64_t d = x.cols;
  {
    const Workspace::Scope scope(ctx.workspace);
    const RowsView embedded = ctx.workspace.TakeDense(x.rows, d, DType::kF32);
    stack_.Embed(ctx, embedded);
    const RowsView both = ctx.workspace.TakeDense(x.rows, 2 * d, compute_);
    backend.Convert(embedded, both.Columns(0, d));
    backend.Norm({.bank = hidden_norm_.get(), .input = hidden, .output = both.Columns(d, d)});
    backend.Linear(
        {.bank = join_.get(), .input = ctx.division.Own(both), .output = ctx.division.Own(x)});
    ctx.division.Gather(backend, x);
  }
  stack_.RunBlocks(ctx, x);
}

}  // namespace moeserve

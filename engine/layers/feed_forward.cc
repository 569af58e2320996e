#include "engine/layers/feed_forward.h"

namespace moeserve {

Result<std::unique_ptr<FeedForward>> FeedForward::Load(LoadContext& load, const ModelSpec& model,
                                                       int block) {
  auto f = std::make_unique<FeedForward>();
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const std::string prefix = block_spec.name();
  const FeedForwardSpec& spec = *block_spec.feed_forward();
  const int d = model.hidden_size;
  if (spec.out_bias) {
    MOESERVE_ASSIGN_OR_RETURN(f->out_bias_, LoadVector(load, prefix + ".out_bias", d));
  }
  if (!spec.routed()) {
    MOESERVE_ASSIGN_OR_RETURN(
        f->dense_, FeedForwardExperts::Load(load, {prefix}, spec.expert, {spec.width}, d));
    return f;
  }
  std::vector<std::string> names;
  for (int e = 0; e < spec.routing->num_places(); ++e) {
    names.push_back(prefix + ".experts." + std::to_string(e));
  }
  const int latent = spec.routing->latent_width;
  const RoutedExperts routed = load.ExpertsOf(model, block);
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<FeedForwardExperts> body,
      FeedForwardExperts::Load(load, names, spec.expert, spec.routing->PlaceWidths(),
                               latent > 0 ? latent : d / spec.routing->split.heads, &routed));
  if (spec.routing->weight_input) body->WeightInputs();
  f->late_ = spec.late_experts;
  MOESERVE_ASSIGN_OR_RETURN(f->routed_, RoutedLayer::Load(load, model, block, std::move(body)));
  if (spec.shared_width > 0) {
    ExpertSpec shared = spec.expert;
    shared.activation_limit = spec.shared_limit.value_or(shared.activation_limit);
    MOESERVE_ASSIGN_OR_RETURN(f->dense_, FeedForwardExperts::Load(load, {prefix + ".shared"},
                                                                  shared, {spec.shared_width}, d));
    if (spec.shared_gate) {
      MOESERVE_ASSIGN_OR_RETURN(f->shared_gate_,
                                LoadLinear(load, d, {{prefix + ".shared_gate", 1, false}}));
    }
    if (spec.shared_norms) {
      MOESERVE_ASSIGN_OR_RETURN(f->shared_norm_, LoadRowNorm(load, prefix + ".shared_norm", d));
      MOESERVE_ASSIGN_OR_RETURN(f->shared_output_norm_,
                                LoadRowNorm(load, prefix + ".shared_output_norm", d));
      MOESERVE_ASSIGN_OR_RETURN(f->experts_norm_, LoadRowNorm(load, prefix + ".experts_norm", d));
    }
  }
  return f;
}

void FeedForward::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  if (routed_ == nullptr) {
    {
      const PartTimer timer(ctx.times, &StepTimes::rows);
      dense_->RunDense(ctx, ctx.division.Own(x), ctx.division.Own(output));
    }
    return ctx.division.Gather(ctx.backend, output);
  }
  if (dense_ != nullptr) ctx.left_sum = nullptr;  // the shared expert is added to the sum
  // If the routed layer computes its output by rows, the shared expert is added to these rows, and
  // only the sum is gathered.
  RowDivision sums;
  const bool adds = dense_ != nullptr && !late_;
  routed_->Forward(ctx, x, late_ ? ctx.late : output, adds ? &sums : nullptr);
  if (dense_ == nullptr) return;
  const RowDivision& division = sums.divided() ? sums : ctx.division;
  const RowsView shared = late_ ? output : ctx.TakeGathered(x.rows, x.cols, DType::kF32);
  const RowsView own = division.Own(shared);
  RowsView input = division.Own(x);
  if (shared_norm_ != nullptr) {
    const RowsView experts = sums.Own(output);
    ctx.backend.Norm({.bank = experts_norm_.get(), .input = experts, .output = experts});
    input = ctx.workspace.TakeDense(own.rows, x.cols, ctx.activation);
    ctx.backend.Norm(
        {.bank = shared_norm_.get(), .input = division.Own(ctx.stream), .output = input});
  }
  dense_->RunDense(ctx, input, own);
  if (shared_gate_ != nullptr) {
    const RowsView gate = ctx.workspace.Take(own.rows, 1, DType::kF32);
    ctx.backend.Linear({.bank = shared_gate_.get(), .input = input, .output = gate});
    ctx.backend.ScaleBySigmoid(own, gate);
  }
  if (shared_output_norm_ != nullptr) {
    ctx.backend.Norm({.bank = shared_output_norm_.get(), .input = own, .output = own});
  }
  if (sums.divided()) {
    ctx.backend.AddScaled(division.Own(output), own, nullptr, 1.0f);
    return division.Gather(ctx.backend, output);
  }
  division.Gather(ctx.backend, shared);
  if (!late_) ctx.backend.AddScaled(output, shared, nullptr, 1.0f);
}

}  // namespace moeserve

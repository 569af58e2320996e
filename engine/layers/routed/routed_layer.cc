#include "engine/layers/routed/routed_layer.h"

#include <algorithm>

#include "base/check.h"
#include "engine/routes/route_layout.h"

namespace moeserve {
namespace {

// The h sub-tokens of a token are adjacent columns, so rows of width c are the same memory read
// with another width: splitting and merging copy nothing.
RowsView AsSubTokens(const RowsView& x, int heads) {
  MOESERVE_CHECK(heads == 1 || x.stride == x.cols, "sub-tokens need rows without padding");
  RowsView v = x;
  v.rows *= heads;
  v.cols /= heads;
  if (heads > 1) v.stride = v.cols;
  return v;
}

}  // namespace

Result<std::unique_ptr<RoutedLayer>> RoutedLayer::Load(LoadContext& load, const std::string& prefix,
                                                       int layer, BlockKind block,
                                                       const RoutedLayerSpec& spec, int model_width,
                                                       std::unique_ptr<ExpertBody> body) {
  auto routed = std::make_unique<RoutedLayer>();
  routed->slot_ = PlanSlot(layer, block);
  routed->layer_ = layer;
  routed->block_ = block;
  routed->heads_ = spec.split.heads;
  routed->width_ = model_width / spec.split.heads;
  routed->num_experts_ = spec.num_experts;
  routed->residual_ = spec.split.residual;
  routed->body_ = std::move(body);
  MOESERVE_ASSIGN_OR_RETURN(
      routed->router_, LoadRouter(load, prefix + ".router", spec, model_width / spec.split.heads));
  if (spec.split.heads > 1 && spec.split.projection) {
    const bool bias = spec.split.bias;
    MOESERVE_ASSIGN_OR_RETURN(
        routed->split_, LoadLinear(load, model_width, {{prefix + ".split", model_width, bias}}));
    MOESERVE_ASSIGN_OR_RETURN(
        routed->merge_, LoadLinear(load, model_width, {{prefix + ".merge", model_width, bias}}));
  }
  return routed;
}

RowsView RoutedLayer::Split(StepContext& ctx, const RowsView& x) const {
  if (split_ == nullptr) return AsSubTokens(x, heads_);
  RowsView projected = ctx.workspace.TakeDense(x.rows, x.cols, ctx.activation);
  ctx.backend.Linear({.bank = split_.get(), .input = x, .output = projected});
  return AsSubTokens(projected, heads_);
}

std::vector<RouteOverride> RoutedLayer::Overrides(const StepContext& ctx) const {
  std::vector<RouteOverride> overrides;
  const Batch& batch = ctx.batch;
  if (batch.controls.empty()) return overrides;
  overrides.resize(static_cast<size_t>(batch.num_tokens()) * heads_);
  for (int t = 0; t < batch.num_tokens(); ++t) {
    // Tokens of no sequence are as the first one's (Model::Reserve).
    const int sequence = std::max(batch.sequence[t], 0);
    const RoutingControl* control = batch.controls[static_cast<size_t>(sequence)];
    if (control == nullptr) continue;
    const RouteOverride change = control->For(layer_, block_);
    std::fill_n(overrides.begin() + static_cast<std::ptrdiff_t>(t) * heads_, heads_, change);
  }
  return overrides;
}

RoutingPlan RoutedLayer::Route(StepContext& ctx, const RowsView& rows) const {
  const GivenRoutes* given = ctx.hooks == nullptr ? nullptr : ctx.hooks->RoutesFor(layer_, block_);
  const std::vector<RouteOverride> overrides = Overrides(ctx);
  RouteArgs args{.router = router_.get(),
                 .input = rows,
                 .given = given,
                 .slot = slot_,
                 .overrides = overrides};
  const Workspace::Scope scope(ctx.workspace);
  const KeptRows kept = ctx.kept.empty() ? KeptRows{} : ctx.kept[static_cast<size_t>(slot_)];
  RowsView scores = kept.scores;
  if (ctx.hooks_at_once && ctx.hooks != nullptr && ctx.hooks->WantsScores() && given == nullptr) {
    scores = ctx.workspace.TakeDense(rows.rows, num_experts_, DType::kF32);
  }
  if (scores.data != nullptr) args.scores = &scores;
  if (kept.inputs.data != nullptr) ctx.backend.Convert(rows, kept.inputs);
  const RoutingPlan plan = ctx.backend.Route(args);
  if (ctx.hooks == nullptr || !ctx.hooks_at_once) return plan;
  const RoutingPlan seen = ctx.backend.HostPlan(slot_);
  ctx.hooks->OnPlan(layer_, block_, seen);
  std::vector<float> host;
  const auto fetch = [&](const RowsView& view) {
    host.resize(static_cast<size_t>(view.rows * view.cols));
    ctx.backend.CopyToHost(view, host);
    return std::span<const float>(host);
  };
  if (args.scores != nullptr) ctx.hooks->OnScores(layer_, block_, seen, fetch(scores));
  if (ctx.hooks->WantsInputs()) ctx.hooks->OnInputs(layer_, block_, seen, fetch(rows));
  return plan;
}

int64_t RoutedLayer::LayOutKept(int64_t tokens, StepLooks looks, float* memory,
                                KeptRows& kept) const {
  int64_t end = 0;
  const auto place = [&](bool wanted, int cols, RowsView& view) {
    if (!wanted) return;
    const int64_t rows = tokens * heads_;
    if (memory != nullptr) view = {memory + end, DType::kF32, rows, cols, cols};
    constexpr int64_t kAligned = 64;  // vectors of any kernel
    end += (rows * cols + kAligned - 1) / kAligned * kAligned;
  };
  place(looks.scores, num_experts_, kept.scores);
  place(looks.inputs, width_, kept.inputs);
  return end;
}

void RoutedLayer::Tell(Backend& backend, StepHooks& hooks, std::span<const float> scores,
                       std::span<const float> inputs) const {
  const RoutingPlan plan = backend.HostPlan(slot_);
  hooks.OnPlan(layer_, block_, plan);
  // Rows that only fill up the step come last.
  const auto of_plan = [&](std::span<const float> rows, int cols) {
    return rows.first(static_cast<size_t>(plan.rows) * static_cast<size_t>(cols));
  };
  if (!scores.empty()) hooks.OnScores(layer_, block_, plan, of_plan(scores, num_experts_));
  if (!inputs.empty()) hooks.OnInputs(layer_, block_, plan, of_plan(inputs, width_));
}

void RoutedLayer::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const RowsView rows = Split(ctx, x);
  const RoutingPlan plan = Route(ctx, rows);
  const RowsView results = body_->Run(ctx, &plan, rows);
  const RowsView* residual = residual_ ? &rows : nullptr;
  if (merge_ == nullptr) {
    ctx.backend.Combine({.plan = &plan,
                         .results = results,
                         .residual = residual,
                         .output = AsSubTokens(output, heads_)});
    return;
  }
  const RowsView combined = ctx.workspace.TakeDense(x.rows, x.cols, ctx.activation);
  ctx.backend.Combine({.plan = &plan,
                       .results = results,
                       .residual = residual,
                       .output = AsSubTokens(combined, heads_)});
  ctx.backend.Linear({.bank = merge_.get(), .input = combined, .output = output});
}

}  // namespace moeserve

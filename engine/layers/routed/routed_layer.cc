#include "engine/layers/routed/routed_layer.h"

#include <algorithm>

#include "base/check.h"
#include "engine/routes/route_layout.h"

namespace moeserve {
namespace {

// Returns the same memory viewed as sub-tokens: the h sub-tokens of a token are adjacent groups of
// columns, so splitting and merging copy nothing.
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
    // In Model::Reserve() the sequence ids are negative; such tokens use the first routing
    // override.
    const int sequence = std::max(batch.sequence[t], 0);
    const RoutingControl* control = batch.controls[static_cast<size_t>(sequence)];
    if (control == nullptr) continue;
    const RouteOverride change = control->For(layer_, block_);
    std::fill_n(overrides.begin() + static_cast<std::ptrdiff_t>(t) * heads_, heads_, change);
  }
  return overrides;
}

RoutingPlan RoutedLayer::Route(StepContext& ctx, const RowsView& rows) const {
  const std::vector<RouteOverride> overrides = Overrides(ctx);
  const ReportedRows& reported = ctx.reported.of_slot(slot_);
  if (reported.inputs.data != nullptr) ctx.backend.Convert(rows, reported.inputs);
  return ctx.backend.Route(
      {.router = router_.get(),
       .input = rows,
       .given = ctx.batch.given.empty() ? nullptr : ctx.batch.given[static_cast<size_t>(slot_)],
       .slot = slot_,
       .scores = reported.scores.data != nullptr ? &reported.scores : nullptr,
       .overrides = overrides});
}

void RoutedLayer::CombineAndMerge(StepContext& ctx, const RoutingPlan& plan,
                                  const RowsView& results, const RowsView& rows,
                                  const RowsView& output) const {
  RowsView combined = output;
  if (merge_ != nullptr) {
    combined = ctx.workspace.TakeDense(output.rows, output.cols, ctx.activation);
  }
  ctx.backend.Combine({.plan = &plan,
                       .results = results,
                       .residual = residual_ ? &rows : nullptr,
                       .output = AsSubTokens(combined, heads_)});
  if (merge_ != nullptr) {
    ctx.backend.Linear({.bank = merge_.get(), .input = combined, .output = output});
  }
}

void RoutedLayer::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const RowsView rows = Split(ctx, x);
  const RoutingPlan plan = Route(ctx, rows);
  const RowsView results = body_->Run(ctx, &plan, rows);
  CombineAndMerge(ctx, plan, results, rows, output);
}

}  // namespace moeserve

#include "engine/layers/routed/expert_body.h"

#include <algorithm>
#include <utility>

namespace moeserve {

Result<FeedForwardExperts::Sublayer> FeedForwardExperts::LoadSublayer(
    LoadContext& load, const std::vector<std::string>& prefixes, const ExpertSpec& spec,
    const std::vector<int>& widths, int model_width, const RoutedExperts* routed) {
  Sublayer sublayer;
  std::vector<int> model_widths;
  for (const int width : widths) model_widths.push_back(width > 0 ? model_width : 0);
  const auto load_norm = [&](const char* name, const std::vector<int>& norm_widths) {
    std::vector<std::string> names;
    for (const std::string& p : prefixes) names.push_back(p + name);
    return LoadNorm(load, names, norm_widths);
  };
  if (spec.residual) {
    MOESERVE_ASSIGN_OR_RETURN(sublayer.norm, load_norm(".norm", model_widths));
  }
  BankNames up{prefixes, "up", std::nullopt};
  if (spec.form == ExpertForm::kGated) up.gate = "gate";
  MOESERVE_ASSIGN_OR_RETURN(sublayer.up,
                            LoadBank(load, {model_width}, widths, up, spec.bias, routed));
  if (spec.inner_norm) {
    MOESERVE_ASSIGN_OR_RETURN(sublayer.inner_norm, load_norm(".inner_norm", widths));
  }
  MOESERVE_ASSIGN_OR_RETURN(
      sublayer.down,
      LoadBank(load, widths, model_widths, {prefixes, "down", std::nullopt}, spec.bias, routed));
  return sublayer;
}

Result<std::unique_ptr<FeedForwardExperts>> FeedForwardExperts::Load(
    LoadContext& load, const std::vector<std::string>& prefixes, const ExpertSpec& spec,
    const std::vector<int>& widths, int model_width, const RoutedExperts* routed) {
  auto body = std::make_unique<FeedForwardExperts>();
  body->activation_ = spec.activation;
  body->activation_.limit = spec.activation_limit;
  body->activation_.slope = spec.activation_slope;
  body->activation_.up_offset = spec.up_offset;
  body->activation_.limit_after = spec.limit_after;
  body->widest_ = *std::max_element(widths.begin(), widths.end());
  body->residual_ = spec.residual;
  for (int i = 0; i < spec.depth; ++i) {
    std::vector<std::string> names = prefixes;
    for (std::string& name : names) {
      if (spec.residual) name += ".layers." + std::to_string(i);
    }
    MOESERVE_ASSIGN_OR_RETURN(Sublayer sublayer,
                              LoadSublayer(load, names, spec, widths, model_width, routed));
    body->sublayers_.push_back(std::move(sublayer));
  }
  return body;
}

std::vector<LinearBank*> FeedForwardExperts::banks() const {
  std::vector<LinearBank*> banks;
  for (const Sublayer& sublayer : sublayers_) {
    banks.push_back(sublayer.up.get());
    banks.push_back(sublayer.down.get());
  }
  return banks;
}

RowsView FeedForwardExperts::Hidden(StepContext& ctx, const Sublayer& sublayer,
                                    const RoutingPlan* plan, bool gather, const RowsView& rows,
                                    int64_t count) const {
  const bool normed = sublayer.inner_norm != nullptr;
  RowsView hidden = ctx.workspace.Take(count, widest_, normed ? DType::kF32 : ctx.activation);
  ctx.backend.Linear({.bank = sublayer.up.get(),
                      .plan = plan,
                      .gather = gather,
                      .input = rows,
                      .output = hidden,
                      .activation = activation_,
                      .pad_output = true});
  if (!normed) return hidden;
  RowsView normalised = ctx.workspace.Take(count, widest_, ctx.activation);
  ctx.backend.Norm(
      {.bank = sublayer.inner_norm.get(), .plan = plan, .input = hidden, .output = normalised});
  return normalised;
}

void FeedForwardExperts::Compute(StepContext& ctx, const Sublayer& sublayer,
                                 const RoutingPlan* plan, bool gather, const RowsView& rows,
                                 const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const FeedForwardArgs both{.up = sublayer.up.get(),
                             .down = sublayer.down.get(),
                             .plan = plan,
                             .gather = gather,
                             .input = rows,
                             .output = output,
                             .activation = activation_};
  if (plan != nullptr && sublayer.inner_norm == nullptr && ctx.backend.FusesFeedForward(both)) {
    ctx.backend.FusedFeedForward(both);
    return;
  }
  const RowsView hidden = Hidden(ctx, sublayer, plan, gather, rows, output.rows);
  ctx.backend.Linear(
      {.bank = sublayer.down.get(), .plan = plan, .input = hidden, .output = output});
}

void FeedForwardExperts::ComputeStack(StepContext& ctx, const RoutingPlan* plan,
                                      const RowsView& rows, const RowsView& stack) const {
  const Workspace::Scope scope(ctx.workspace);
  if (plan != nullptr) {
    ctx.backend.AssignRows(
        {.plan = plan, .input = rows, .output = stack, .weighted = weight_inputs_});
  } else {
    ctx.backend.Convert(rows, stack);
  }
  const RowsView normed = ctx.workspace.Take(stack.rows, stack.cols, ctx.activation);
  const RowsView branch = ctx.workspace.Take(stack.rows, stack.cols, DType::kF32);
  for (const Sublayer& sublayer : sublayers_) {
    ctx.backend.Norm({.bank = sublayer.norm.get(), .plan = plan, .input = stack, .output = normed});
    Compute(ctx, sublayer, plan, false, normed, branch);
    ctx.backend.AddScaled(stack, branch, nullptr, 1.0f);
  }
}

void FeedForwardExperts::Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
                             const RowsView& results) const {
  if (!residual_ && weight_inputs_) {
    const Workspace::Scope scope(ctx.workspace);
    const RowsView inputs = ctx.workspace.Take(plan.capacity, rows.cols, ctx.activation);
    ctx.backend.AssignRows({.plan = &plan, .input = rows, .output = inputs, .weighted = true});
    Compute(ctx, sublayers_.front(), &plan, false, inputs, results);
  } else if (!residual_) {
    Compute(ctx, sublayers_.front(), &plan, true, rows, results);
  } else if (results.dtype == DType::kF32) {
    ComputeStack(ctx, &plan, rows, results);
  } else {
    const Workspace::Scope scope(ctx.workspace);
    const RowsView stack = ctx.workspace.Take(plan.capacity, rows.cols, DType::kF32);
    ComputeStack(ctx, &plan, rows, stack);
    ctx.backend.Convert(stack, results);
  }
}

void FeedForwardExperts::RunDense(StepContext& ctx, const RowsView& rows,
                                  const RowsView& output) const {
  if (residual_) {
    ComputeStack(ctx, nullptr, rows, output);
  } else {
    Compute(ctx, sublayers_.front(), nullptr, false, rows, output);
  }
}

}  // namespace moeserve

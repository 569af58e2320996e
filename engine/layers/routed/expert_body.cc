#include "engine/layers/routed/expert_body.h"

#include <algorithm>

namespace moeserve {
namespace {

int64_t ResultRows(const RoutingPlan* plan, const RowsView& rows) {
  return plan == nullptr ? rows.rows : plan->capacity;
}

}  // namespace

RopeSettings RopeOf(const ModelSpec& model, const AttentionSpec& attention) {
  const PositionSpec& position = PositionOf(model, attention);
  RopeSettings rope;
  rope.head_dim = attention.rope_width();
  if (position.kind != PositionKind::kRope) return rope;
  rope.dimensions = RopeDimensions(position, attention.rope_width());
  rope.theta = position.theta;
  rope.interleaved = position.pairing == RopePairing::kInterleaved;
  if (position.scaling != RopeScaling()) {
    rope.scaling = std::make_shared<const RopeScaling>(position.scaling);
  }
  return rope;
}

Result<std::unique_ptr<FeedForwardExperts>> FeedForwardExperts::Load(
    LoadContext& load, const std::vector<std::string>& prefixes, const ExpertSpec& spec,
    const std::vector<int>& widths, int model_width) {
  auto body = std::make_unique<FeedForwardExperts>();
  body->activation_ = spec.activation;
  body->activation_.limit = spec.activation_limit;
  body->activation_.slope = spec.activation_slope;
  body->activation_.up_offset = spec.up_offset;
  body->widest_ = *std::max_element(widths.begin(), widths.end());
  BankNames up{prefixes, "up", std::nullopt};
  if (spec.form == ExpertForm::kGated) up.gate = "gate";
  MOESERVE_ASSIGN_OR_RETURN(body->up_, LoadBank(load, {model_width}, widths, up, spec.bias));
  if (spec.inner_norm) {
    std::vector<std::string> names;
    for (const std::string& p : prefixes) names.push_back(p + ".inner_norm");
    MOESERVE_ASSIGN_OR_RETURN(body->inner_norm_, LoadNorm(load, names, widths));
  }
  MOESERVE_ASSIGN_OR_RETURN(body->down_,
                            LoadBank(load, widths, std::vector<int>(widths.size(), model_width),
                                     {prefixes, "down", std::nullopt}, spec.bias));
  return body;
}

RowsView FeedForwardExperts::Hidden(StepContext& ctx, const RoutingPlan* plan,
                                    const RowsView& rows) const {
  const int64_t count = ResultRows(plan, rows);
  const bool normed = inner_norm_ != nullptr;
  RowsView hidden = ctx.workspace.Take(count, widest_, normed ? DType::kF32 : ctx.activation);
  ctx.backend.Linear({.bank = up_.get(),
                      .plan = plan,
                      .gather = plan != nullptr,
                      .input = rows,
                      .output = hidden,
                      .activation = activation_,
                      .pad_output = true});
  if (!normed) return hidden;
  RowsView normalised = ctx.workspace.Take(count, widest_, ctx.activation);
  ctx.backend.Norm(
      {.bank = inner_norm_.get(), .plan = plan, .input = hidden, .output = normalised});
  return normalised;
}

RowsView FeedForwardExperts::Run(StepContext& ctx, const RoutingPlan* plan,
                                 const RowsView& rows) const {
  RowsView results = ctx.workspace.Take(ResultRows(plan, rows), rows.cols, ctx.activation);
  if (inner_norm_ == nullptr &&
      ctx.backend.FusesFeedForward(*up_, *down_, rows.dtype, results.rows)) {
    ctx.backend.FusedFeedForward({.up = up_.get(),
                                  .down = down_.get(),
                                  .plan = plan,
                                  .gather = plan != nullptr,
                                  .input = rows,
                                  .output = results,
                                  .activation = activation_});
    return results;
  }
  const RowsView hidden = Hidden(ctx, plan, rows);
  ctx.backend.Linear({.bank = down_.get(), .plan = plan, .input = hidden, .output = results});
  return results;
}

void FeedForwardExperts::RunDense(StepContext& ctx, const RowsView& rows,
                                  const RowsView& output) const {
  const RowsView hidden = Hidden(ctx, nullptr, rows);
  ctx.backend.Linear({.bank = down_.get(), .input = hidden, .output = output});
}

}  // namespace moeserve

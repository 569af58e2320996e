#include "engine/layers/routed/attention_experts.h"

namespace moeserve {

Result<std::unique_ptr<AttentionExperts>> AttentionExperts::Load(
    LoadContext& load, const std::string& prefix, int layer, const AttentionSpec& spec,
    const RopeSettings& rope, const ModelSpec& model, int block) {
  auto body = std::make_unique<AttentionExperts>();
  const int experts = spec.routing->num_experts;
  const int width = spec.num_kv_heads * spec.head_dim;
  std::vector<std::string> names;
  for (int e = 0; e < experts; ++e) names.push_back(prefix + ".experts." + std::to_string(e));
  const auto widths = [&](int outputs) {
    return std::vector<int>(static_cast<size_t>(experts), outputs);
  };
  const RoutedExperts routed = load.ExpertsOf(model, block);
  const int d = model.hidden_size;
  MOESERVE_ASSIGN_OR_RETURN(
      body->query_, LoadBank(load, {d}, widths(width), {names, "q", std::nullopt}, false, &routed));
  MOESERVE_ASSIGN_OR_RETURN(body->output_, LoadBank(load, {width}, widths(d),
                                                    {names, "o", std::nullopt}, false, &routed));
  body->heads_ = spec.num_kv_heads;
  body->selected_ = spec.routing->select.MaxSelected();
  body->rope_ = rope;
  body->layer_ = layer;
  body->scale_ = static_cast<float>(spec.scale);
  body->soft_cap_ = static_cast<float>(spec.soft_cap);
  body->causal_ = *spec.causal;
  body->window_ = spec.window.value_or(0);
  body->chunks_ = spec.window_kind == WindowKind::kChunk;
  return body;
}

void AttentionExperts::Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
                           const RowsView& results) const {
  const Workspace::Scope scope(ctx.workspace);
  const int64_t width = int64_t{heads_} * rope_.head_dim;
  const int64_t count = plan.capacity;
  RowsView query = ctx.workspace.Take(count, width, DType::kF32);
  RowsView heads = ctx.workspace.Take(count, width, ctx.activation);
  ctx.backend.Linear(
      {.bank = query_.get(), .plan = &plan, .gather = true, .input = rows, .output = query});
  ctx.backend.Attention({.cache = &ctx.cache,
                         .layer = layer_,
                         .causal = causal_,
                         .plan = &plan,
                         .rows_per_token = selected_,
                         .heads = heads_,
                         .order = HeadOrder::kTile,
                         .scale = scale_,
                         .soft_cap = soft_cap_,
                         .window = window_,
                         .chunks = chunks_,
                         .append = ctx.left_append,
                         .rope = rope_.dimensions > 0 ? &rope_ : nullptr,
                         .query = query,
                         .output = heads});
  ctx.backend.Linear({.bank = output_.get(), .plan = &plan, .input = heads, .output = results});
}

}  // namespace moeserve

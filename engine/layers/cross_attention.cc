#include "engine/layers/cross_attention.h"

#include <string>
#include <utility>
#include <vector>

#include "engine/layers/routed/attention_experts.h"

namespace moeserve {

Result<std::unique_ptr<CrossAttention>> CrossAttention::Load(LoadContext& load,
                                                             const ModelSpec& model, int block) {
  auto a = std::make_unique<CrossAttention>();
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const std::string prefix = block_spec.name();
  const AttentionSpec& spec = *block_spec.cross_attention();
  const int d = model.hidden_size;
  a->layer_ = CacheLayer(model, block);
  a->spec_ = spec;
  a->spec_.causal = false;
  const int kv_width = spec.num_kv_heads * spec.head_dim;
  MOESERVE_ASSIGN_OR_RETURN(
      a->keys_values_,
      StackedLinear::Load(
          load, d, {{prefix + ".k", kv_width, spec.bias}, {prefix + ".v", kv_width, spec.bias}}));
  if (spec.out_bias) {
    MOESERVE_ASSIGN_OR_RETURN(a->out_bias_, LoadVector(load, prefix + ".out_bias", d));
  }
  if (spec.routed()) {
    RopeSettings none;
    none.head_dim = spec.head_dim;
    MOESERVE_ASSIGN_OR_RETURN(
        std::unique_ptr<ExpertBody> body,
        AttentionExperts::Load(load, prefix, a->layer_, a->spec_, none, model, block));
    MOESERVE_ASSIGN_OR_RETURN(a->routed_, RoutedLayer::Load(load, model, block, std::move(body)));
    return a;
  }
  const int q_width = spec.num_heads * spec.head_dim;
  std::vector<LinearPart> parts = {{prefix + ".q", q_width, spec.bias}};
  if (spec.gate) parts.push_back({prefix + ".gate", spec.gates(), spec.gate_bias});
  MOESERVE_ASSIGN_OR_RETURN(a->queries_, StackedLinear::Load(load, d, parts));
  MOESERVE_ASSIGN_OR_RETURN(a->output_, LoadLinear(load, q_width, {{prefix + ".o", d, false}}));
  if (spec.inner_norm) {
    MOESERVE_ASSIGN_OR_RETURN(a->inner_norm_, LoadNorm(load, {prefix + ".inner_norm"}, {q_width}));
  }
  if (spec.qk_norm != QkNorm::kNone) {
    const bool head = spec.qk_norm == QkNorm::kHead;
    MOESERVE_ASSIGN_OR_RETURN(
        a->query_norm_, LoadRmsNorm(load, prefix + ".q_norm", head ? spec.head_dim : q_width));
    MOESERVE_ASSIGN_OR_RETURN(
        a->key_norm_, LoadRmsNorm(load, prefix + ".k_norm", head ? spec.head_dim : kv_width));
  }
  return a;
}

void CrossAttention::Remember(StepContext& ctx, const RowsView& source) const {
  const Workspace::Scope scope(ctx.workspace);
  const int kv_width = spec_.num_kv_heads * spec_.head_dim;
  const RowsView rows = ctx.TakeGathered(source.rows, 2 * int64_t{kv_width}, DType::kF32);
  keys_values_.Run(ctx.backend, ctx.division.Own(source), ctx.division.Own(rows));
  ctx.division.Gather(ctx.backend, rows);
  RopeSettings none;
  none.head_dim = spec_.head_dim;
  ctx.backend.NormRopeAppend({.cache = &ctx.cache,
                              .layer = layer_,
                              .rows = rows,
                              .key_norm = key_norm_.get(),
                              .norm_heads = spec_.qk_norm == QkNorm::kHead,
                              .rope = none});
}

void CrossAttention::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  if (routed_ != nullptr) return routed_->Forward(ctx, x, output);
  const Workspace::Scope scope(ctx.workspace);
  const int q_width = spec_.num_heads * spec_.head_dim;
  const int gate_width = spec_.gates();
  const RowsView own = ctx.division.Own(x);
  const RowsView all = ctx.workspace.Take(own.rows, int64_t{q_width} + gate_width, DType::kF32);
  queries_.Run(ctx.backend, own, all);
  const RowsView query = all.Columns(0, q_width);
  if (query_norm_ != nullptr) {
    ctx.backend.Norm({.bank = query_norm_.get(),
                      .segments = spec_.qk_norm == QkNorm::kHead ? spec_.num_heads : 1,
                      .input = query,
                      .output = query});
  }
  // A norm reads f32.
  const RowsView heads =
      ctx.workspace.Take(own.rows, q_width, spec_.inner_norm ? DType::kF32 : ctx.activation);
  ctx.backend.Attention({.cache = &ctx.cache,
                         .layer = layer_,
                         .causal = false,
                         .first_token = ctx.division.first_token(),
                         .heads = spec_.num_heads,
                         .order = spec_.group_order == GroupOrder::kInterleave
                                      ? HeadOrder::kInterleave
                                      : HeadOrder::kTile,
                         .scale = static_cast<float>(spec_.scale),
                         .soft_cap = static_cast<float>(spec_.soft_cap),
                         .query = query,
                         .output = heads});
  if (spec_.gate) {
    ctx.backend.MultiplyByGate(heads, all.Columns(q_width, gate_width), spec_.gate_activation);
  }
  RowsView normed = heads;
  if (inner_norm_ != nullptr) {
    if (ctx.activation != DType::kF32) {
      normed = ctx.workspace.Take(own.rows, q_width, ctx.activation);
    }
    ctx.backend.Norm({.bank = inner_norm_.get(), .input = heads, .output = normed});
  }
  ctx.backend.Linear({.bank = output_.get(), .input = normed, .output = ctx.division.Own(output)});
  ctx.division.Gather(ctx.backend, output);
}

}  // namespace moeserve

#include "engine/layers/attention.h"

#include "engine/layers/routed/attention_experts.h"

namespace moeserve {

Result<std::unique_ptr<Attention>> Attention::Load(LoadContext& load, const ModelSpec& model,
                                                   int block) {
  auto a = std::make_unique<Attention>();
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const std::string prefix = block_spec.name();
  const AttentionSpec& spec = *block_spec.attention();
  const int d = model.hidden_size;
  a->layer_ = load.first_cache_layer + CacheLayer(model, block);
  a->spec_ = spec;
  a->spec_.causal = IsCausal(model, spec);
  a->rope_ = RopeOf(model, spec);
  a->relative_biases_ = load.relative_biases;
  if (model.relative_bias.has_value() && model.relative_bias->per_layer) {
    MOESERVE_ASSIGN_OR_RETURN(a->own_biases_, LoadRelativeBiases(load, model, block_spec.layer));
    a->relative_biases_ = &a->own_biases_;
  }
  const int kv_width = spec.num_kv_heads * spec.head_dim;
  const LinearPart k{prefix + ".k", kv_width, spec.bias};
  const LinearPart v{prefix + ".v", kv_width, spec.bias};
  if (spec.out_bias) {
    MOESERVE_ASSIGN_OR_RETURN(a->out_bias_, LoadVector(load, prefix + ".out_bias", d));
  }
  if (spec.routed()) {
    MOESERVE_ASSIGN_OR_RETURN(a->projection_, StackedLinear::Load(load, d, {k, v}));
    MOESERVE_ASSIGN_OR_RETURN(
        std::unique_ptr<ExpertBody> body,
        AttentionExperts::Load(load, prefix, a->layer_, a->spec_, a->rope_, d));
    MOESERVE_ASSIGN_OR_RETURN(a->routed_, RoutedLayer::Load(load, model, block, std::move(body)));
    return a;
  }
  const int q_width = spec.num_heads * spec.head_dim;
  std::vector<LinearPart> parts = {{prefix + ".q", q_width, spec.bias}, k, v};
  if (spec.gate) parts.push_back({prefix + ".gate", spec.gates(), spec.gate_bias});
  MOESERVE_ASSIGN_OR_RETURN(a->projection_, StackedLinear::Load(load, d, parts));
  MOESERVE_ASSIGN_OR_RETURN(a->output_, LoadLinear(load, q_width, {{prefix + ".o", d, false}}));
  if (spec.inner_norm) {
    MOESERVE_ASSIGN_OR_RETURN(a->inner_norm_, LoadNorm(load, {prefix + ".inner_norm"}, {q_width}));
  }
  if (spec.sinks) {
    MOESERVE_ASSIGN_OR_RETURN(a->sinks_, LoadVector(load, prefix + ".sinks", spec.num_heads));
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

void Attention::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const int kv_width = spec_.num_kv_heads * spec_.head_dim;
  const int q_width = spec_.routed() ? 0 : spec_.num_heads * spec_.head_dim;
  const int qkv_width = q_width + 2 * kv_width;
  const int gate_width = spec_.gates();
  const RowsView all = ctx.workspace.Take(x.rows, qkv_width + gate_width, DType::kF32);
  projection_.Run(ctx.backend, x, all);
  const RowsView projected = all.Columns(0, qkv_width);
  ctx.backend.NormRopeAppend({.cache = &ctx.cache,
                              .layer = layer_,
                              .rows = projected,
                              .heads = spec_.routed() ? 0 : spec_.num_heads,
                              .query_norm = query_norm_.get(),
                              .key_norm = key_norm_.get(),
                              .norm_heads = spec_.qk_norm == QkNorm::kHead,
                              .norm_last = spec_.qk_norm_after_rope,
                              .clip = static_cast<float>(spec_.qkv_clip),
                              .rope = rope_});
  if (spec_.routed()) {
    routed_->Forward(ctx, x, output);
  } else {
    DenseQueries(ctx, projected.Columns(0, q_width), all.Columns(qkv_width, gate_width), output);
  }
}

void Attention::DenseQueries(StepContext& ctx, const RowsView& query, const RowsView& gate,
                             const RowsView& output) const {
  // A norm reads f32.
  const RowsView heads =
      ctx.workspace.Take(query.rows, query.cols, spec_.inner_norm ? DType::kF32 : ctx.activation);
  const RelativeBiases* const biases = relative_biases_;
  ctx.backend.Attention(
      {.cache = &ctx.cache,
       .layer = layer_,
       .causal = *spec_.causal,
       .heads = spec_.num_heads,
       .order =
           spec_.group_order == GroupOrder::kInterleave ? HeadOrder::kInterleave : HeadOrder::kTile,
       .scale = static_cast<float>(spec_.scale),
       .soft_cap = static_cast<float>(spec_.soft_cap),
       .sinks = sinks_ == nullptr ? nullptr : static_cast<const float*>(sinks_->data()),
       .bias = biases == nullptr ? nullptr : static_cast<const float*>(biases->values->data()),
       .bias_distances = biases == nullptr ? 0 : biases->distances,
       .window = spec_.window.value_or(0),
       .query = query,
       .output = heads});
  if (spec_.gate) ctx.backend.MultiplyByGate(heads, gate, spec_.gate_activation);
  RowsView normed = heads;
  if (spec_.inner_norm) {
    if (ctx.activation != DType::kF32) {
      normed = ctx.workspace.Take(query.rows, query.cols, ctx.activation);
    }
    ctx.backend.Norm({.bank = inner_norm_.get(), .input = heads, .output = normed});
  }
  ctx.backend.Linear({.bank = output_.get(), .input = normed, .output = output});
}

}  // namespace moeserve

#include "engine/layers/attention.h"

#include "engine/layers/routed/attention_experts.h"
#include "engine/layers/routed/value_experts.h"

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
  const int key_width = spec.num_kv_heads * spec.head_dim;
  const LinearPart k{prefix + ".k", key_width, spec.bias};
  const LinearPart v{prefix + ".v", spec.value_width(), spec.bias};
  if (spec.out_bias) {
    MOESERVE_ASSIGN_OR_RETURN(a->out_bias_, LoadVector(load, prefix + ".out_bias", d));
  }
  if (spec.routed()) {
    MOESERVE_ASSIGN_OR_RETURN(a->projection_,
                              StackedLinear::Load(load, d, {k, v}, /*bf16_rows=*/true));
    MOESERVE_ASSIGN_OR_RETURN(
        std::unique_ptr<ExpertBody> body,
        AttentionExperts::Load(load, prefix, a->layer_, a->spec_, a->rope_, model, block));
    MOESERVE_ASSIGN_OR_RETURN(a->routed_, RoutedLayer::Load(load, model, block, std::move(body)));
    return a;
  }
  std::vector<LinearPart> parts = {{prefix + ".q", spec.num_heads * spec.head_dim, spec.bias}};
  if (!spec.kv_layer.has_value()) parts.push_back(k);
  const LinearPart gate{prefix + ".gate", spec.gates(), spec.gate_bias};
  if (spec.projects_values()) parts.push_back(v);
  if (spec.gate && spec.projects_values()) {
    parts.push_back(gate);
  } else if (spec.gate) {
    MOESERVE_ASSIGN_OR_RETURN(a->gate_, LoadLinear(load, d, {gate}, /*bf16_rows=*/true));
  }
  MOESERVE_ASSIGN_OR_RETURN(a->projection_,
                            StackedLinear::Load(load, d, parts, /*bf16_rows=*/true));
  if (spec.value_routing.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<ExpertBody> body,
                              ValueExperts::Load(load, prefix, spec, model, block));
    MOESERVE_ASSIGN_OR_RETURN(a->routed_, RoutedLayer::Load(load, model, block, std::move(body)));
  }
  const int out_width = spec.num_heads * spec.output_dim();
  MOESERVE_ASSIGN_OR_RETURN(
      a->output_, LoadLinear(load, out_width, {{prefix + ".o", d, false}}, /*bf16_rows=*/true));
  if (spec.inner_norm) {
    MOESERVE_ASSIGN_OR_RETURN(a->inner_norm_,
                              LoadNorm(load, {prefix + ".inner_norm"}, {out_width}));
  }
  if (spec.sinks) {
    MOESERVE_ASSIGN_OR_RETURN(a->sinks_, LoadVector(load, prefix + ".sinks", spec.num_heads));
  }
  MOESERVE_RETURN_IF_ERROR(a->LoadQkNorm(load, prefix));
  if (spec.value_norm) {
    MOESERVE_ASSIGN_OR_RETURN(a->value_norm_, NewPlainNorm(load, spec.output_dim()));
  }
  return a;
}

absl::Status Attention::LoadQkNorm(LoadContext& load, const std::string& prefix) {
  const auto both = [&](int queries, int keys, int query_parts, int key_parts) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(query_norm_,
                              LoadRmsNorm(load, prefix + ".q_norm", queries, query_parts));
    if (spec_.kv_layer.has_value()) return absl::OkStatus();
    MOESERVE_ASSIGN_OR_RETURN(key_norm_, LoadRmsNorm(load, prefix + ".k_norm", keys, key_parts));
    return absl::OkStatus();
  };
  const int heads = spec_.num_heads, kv_heads = spec_.num_kv_heads, dim = spec_.head_dim;
  switch (spec_.qk_norm) {
    case QkNorm::kNone:
      return absl::OkStatus();
    case QkNorm::kHead:
      return both(dim, dim, 1, 1);
    case QkNorm::kFull:
      return both(heads * dim, kv_heads * dim, 1, 1);
    case QkNorm::kHeads:
      return both(heads * dim, kv_heads * dim, heads, kv_heads);
    case QkNorm::kL2:
      break;
  }
  MOESERVE_ASSIGN_OR_RETURN(query_norm_, NewPlainNorm(load, dim));
  MOESERVE_ASSIGN_OR_RETURN(key_norm_, NewPlainNorm(load, dim));
  return absl::OkStatus();
}

void Attention::ProjectRows(StepContext& ctx, const RowsView& x, const RowsView& all) const {
  ctx.WithLeftNorm([&](const AddNormArgs* norm) { projection_.Run(ctx.backend, x, all, norm); });
}

void Attention::Project(StepContext& ctx, const RowsView& x, const RowsView& all) const {
  const int64_t q_width = spec_.routed() ? 0 : int64_t{spec_.num_heads} * spec_.head_dim;
  const int64_t key_width = int64_t{spec_.num_kv_heads} * spec_.head_dim;
  const RowsView keys = all.Columns(q_width, key_width);
  const RowsView values = all.Columns(q_width + key_width, spec_.value_width());
  if (spec_.projects_values()) {
    ProjectRows(ctx, x, all);
  } else {
    ProjectRows(ctx, x, all.Columns(0, q_width + key_width));
    if (gate_ != nullptr) {
      const RowsView gate = all.Columns(all.cols - spec_.gates(), spec_.gates());
      ctx.backend.Linear({.bank = gate_.get(), .input = x, .output = gate});
    }
  }
  if (spec_.value_from_key) ctx.backend.Convert(keys, values);
  if (spec_.value_routing.has_value()) routed_->Forward(ctx, x, values);
  if (value_norm_ != nullptr) {
    ctx.backend.Norm({.bank = value_norm_.get(),
                      .segments = spec_.num_kv_heads,
                      .input = values,
                      .output = values});
  }
  if (spec_.value_scale != 1.0) {
    ctx.backend.Scale(values, static_cast<float>(spec_.value_scale));
  }
  if (ProjectNorms()) {
    const RowsView queries = all.Columns(0, q_width);
    ctx.backend.Norm({.bank = query_norm_.get(), .input = queries, .output = queries});
    ctx.backend.Norm({.bank = key_norm_.get(), .input = keys, .output = keys});
  }
}

NormRopeAppendArgs Attention::AppendOf(StepContext& ctx, const RowsView& rows, bool queries) const {
  return {.cache = &ctx.cache,
          .layer = layer_,
          .rows = rows,
          .heads = queries ? spec_.num_heads : 0,
          .query_norm = ProjectNorms() || !queries ? nullptr : query_norm_.get(),
          .key_norm = ProjectNorms() ? nullptr : key_norm_.get(),
          .norm_heads = spec_.qk_norm == QkNorm::kHead || spec_.qk_norm == QkNorm::kL2,
          .norm_last = spec_.qk_norm_after_rope,
          .clip = static_cast<float>(spec_.qkv_clip),
          .rope = rope_};
}

void Attention::PrepareQueries(Backend& backend, const RowsView& queries, int64_t first_token,
                               bool normed) const {
  const bool of_heads = spec_.qk_norm == QkNorm::kHead || spec_.qk_norm == QkNorm::kL2;
  const auto norm = [&] {
    if (query_norm_ == nullptr || normed) return;
    backend.Norm({.bank = query_norm_.get(),
                  .segments = of_heads ? spec_.num_heads : 1,
                  .input = queries,
                  .output = queries});
  };
  if (!spec_.qk_norm_after_rope) norm();
  if (spec_.qkv_clip > 0.0) backend.Clamp(queries, static_cast<float>(spec_.qkv_clip));
  if (rope_.dimensions > 0) {
    backend.Rope({.settings = rope_, .rows = queries, .first_token = first_token});
  }
  if (spec_.qk_norm_after_rope) norm();
}

void Attention::ScaleQueries(Backend& backend, const RowsView& queries, int64_t first_token) const {
  if (!spec_.query_scale.has_value()) return;
  backend.ScaleByPosition(
      {.scale = ScaleOf(*spec_.query_scale), .rows = queries, .first_token = first_token});
}

void Attention::ForwardWithoutKeys(StepContext& ctx, const RowsView& x,
                                   const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const RowsView own = ctx.division.Own(x);
  const int64_t first = ctx.division.first_token();
  const int64_t q_width = int64_t{spec_.num_heads} * spec_.head_dim;
  ctx.PrepareLeftNorm(ctx.division);
  const RowsView all = ctx.workspace.Take(own.rows, q_width + spec_.gates(), DType::kF32);
  const RowsView queries = all.Columns(0, q_width);
  const RowsView gate = all.Columns(q_width, spec_.gates());
  ProjectRows(ctx, own, queries);
  if (gate_ != nullptr) ctx.backend.Linear({.bank = gate_.get(), .input = own, .output = gate});
  PrepareQueries(ctx.backend, queries, first, false);
  ScaleQueries(ctx.backend, queries, first);
  DenseQueries(ctx, ctx.division, queries, gate, output, nullptr);
  ctx.division.Gather(ctx.backend, output);
}

void Attention::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  if (spec_.kv_layer.has_value()) return ForwardWithoutKeys(ctx, x, output);
  if (!spec_.routed()) return ForwardDense(ctx, x, output);
  const Workspace::Scope scope(ctx.workspace);
  const int64_t kv_width = int64_t{spec_.num_kv_heads} * spec_.head_dim + spec_.value_width();
  const RowsView rows = ctx.TakeGathered(x.rows, kv_width, DType::kF32);
  // Before any other operation, because it may take what the block before has left.
  const RoutedLayer::RoutedRows routed = routed_->Route(ctx, x);
  Project(ctx, ctx.division.Own(x), ctx.division.Own(rows));
  ctx.division.Gather(ctx.backend, rows);
  const NormRopeAppendArgs append = AppendOf(ctx, rows, false);
  ctx.left_append = &append;
  routed_->RunRouted(ctx, routed, output);
  ctx.left_append = nullptr;
}

void Attention::ForwardDense(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  // Routed values need all rows.
  const RowDivision division = spec_.value_routing.has_value() ? RowDivision() : ctx.division;
  const int64_t q_width = int64_t{spec_.num_heads} * spec_.head_dim;
  const int64_t kv_width = int64_t{spec_.num_kv_heads} * spec_.head_dim + spec_.value_width();
  const RowsView own = division.Own(x);
  ctx.PrepareLeftNorm(division);
  const RowsView all =
      ctx.workspace.Take(own.rows, q_width + kv_width + spec_.gates(), DType::kF32);
  {
    const PartTimer timer(ctx.times, &StepTimes::rows);
    Project(ctx, own, all);
  }
  const RowsView queries = all.Columns(0, q_width);
  const RowsView gate = all.Columns(q_width + kv_width, spec_.gates());
  if (division.divided() || ctx.times != nullptr) {
    const RowsView rows = ctx.TakeGathered(x.rows, kv_width, DType::kF32);
    ctx.backend.Convert(all.Columns(q_width, kv_width), division.Own(rows));
    division.Gather(ctx.backend, rows);
    ctx.backend.NormRopeAppend(AppendOf(ctx, rows, false));
    {
      const PartTimer timer(ctx.times, &StepTimes::rows);
      PrepareQueries(ctx.backend, queries, division.first_token(), ProjectNorms());
      ScaleQueries(ctx.backend, queries, division.first_token());
      DenseQueries(ctx, division, queries, gate, output, nullptr);
    }
    return division.Gather(ctx.backend, output);
  }
  const NormRopeAppendArgs append = AppendOf(ctx, all.Columns(0, q_width + kv_width), true);
  if (!spec_.query_scale.has_value()) {
    return DenseQueries(ctx, division, queries, gate, output, &append);
  }
  ctx.backend.NormRopeAppend(append);
  ScaleQueries(ctx.backend, queries, 0);
  DenseQueries(ctx, division, queries, gate, output, nullptr);
}

void Attention::DenseQueries(StepContext& ctx, const RowDivision& division, const RowsView& query,
                             const RowsView& gate, const RowsView& output,
                             const NormRopeAppendArgs* append) const {
  // A norm reads f32.
  const int64_t width = int64_t{spec_.num_heads} * spec_.output_dim();
  const RowsView heads =
      ctx.workspace.Take(query.rows, width, spec_.inner_norm ? DType::kF32 : ctx.activation);
  const RelativeBiases* const biases = relative_biases_;
  ctx.backend.Attention(
      {.cache = &ctx.cache,
       .layer = layer_,
       .causal = *spec_.causal,
       .first_token = division.first_token(),
       .heads = spec_.num_heads,
       .order =
           spec_.group_order == GroupOrder::kInterleave ? HeadOrder::kInterleave : HeadOrder::kTile,
       .scale = static_cast<float>(spec_.scale),
       .soft_cap = static_cast<float>(spec_.soft_cap),
       .sinks = sinks_ == nullptr ? nullptr : static_cast<const float*>(sinks_->data()),
       .bias = biases == nullptr ? nullptr : static_cast<const float*>(biases->values->data()),
       .bias_distances = biases == nullptr ? 0 : biases->distances,
       .window = spec_.window.value_or(0),
       .chunks = spec_.window_kind == WindowKind::kChunk,
       .append = append,
       .query = query,
       .output = heads});
  if (spec_.gate) ctx.backend.MultiplyByGate(heads, gate, spec_.gate_activation);
  RowsView normed = heads;
  if (spec_.inner_norm) {
    if (ctx.activation != DType::kF32) {
      normed = ctx.workspace.Take(query.rows, width, ctx.activation);
    }
    ctx.backend.Norm({.bank = inner_norm_.get(), .input = heads, .output = normed});
  }
  ctx.backend.Linear({.bank = output_.get(), .input = normed, .output = division.Own(output)});
}

}  // namespace moeserve

#include "engine/layers/latent_attention.h"

#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"

namespace moeserve {
namespace {

// Returns columns [first, first + count) of each of the `heads` equal segments of the rows, one
// segment per row. The rows must be adjacent.
RowsView SegmentColumns(const RowsView& rows, int heads, int64_t first, int64_t count) {
  RowsView view = rows;
  view.rows = rows.rows * heads;
  view.cols = view.stride = rows.cols / heads;
  return view.Columns(first, count);
}

}  // namespace

Result<std::unique_ptr<LatentAttention>> LatentAttention::Load(LoadContext& load,
                                                               const ModelSpec& model, int block) {
  auto a = std::make_unique<LatentAttention>();
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const AttentionSpec& spec = *block_spec.attention();
  const LatentSpec& latent = *spec.latent;
  const std::string prefix = block_spec.name();
  const int d = model.hidden_size;
  a->layer_ = load.first_cache_layer + CacheLayer(model, block);
  a->heads_ = spec.num_heads;
  a->spec_ = spec;
  a->spec_.causal = IsCausal(model, spec);
  a->key_rope_ = RopeOf(model, spec);
  a->query_rope_ = a->key_rope_;
  a->key_rope_.keys = true;
  a->query_rope_.head_dim = spec.head_dim;
  a->query_rope_.first = spec.head_dim - latent.rope_dim;

  const int query_width = spec.num_heads * spec.head_dim;
  LoadContext load_norm = load;
  load_norm.norm.eps = latent.norm_eps;
  if (latent.query_rank > 0) {
    MOESERVE_ASSIGN_OR_RETURN(
        a->query_down_, LoadLinear(load, d, {{prefix + ".q_down", latent.query_rank, spec.bias}},
                                   /*bf16_rows=*/true));
    MOESERVE_ASSIGN_OR_RETURN(a->query_norm_,
                              LoadRmsNorm(load_norm, prefix + ".q_norm", latent.query_rank));
  }
  MOESERVE_ASSIGN_OR_RETURN(a->query_,
                            LoadLinear(load, latent.query_rank > 0 ? latent.query_rank : d,
                                       {{prefix + ".q", query_width, false}}, /*bf16_rows=*/true));
  MOESERVE_ASSIGN_OR_RETURN(
      a->latent_,
      LoadLinear(load, d, {{prefix + ".latent", latent.rank + latent.rope_dim, spec.bias}},
                 /*bf16_rows=*/true));
  MOESERVE_ASSIGN_OR_RETURN(a->latent_norm_,
                            LoadRmsNorm(load_norm, prefix + ".latent_norm", latent.rank));
  std::vector<std::string> heads;
  for (int h = 0; h < spec.num_heads; ++h) heads.push_back(Concat(prefix, ".heads.", h));
  const auto all = [&](int width) {
    return std::vector<int>(static_cast<size_t>(spec.num_heads), width);
  };
  MOESERVE_ASSIGN_OR_RETURN(a->absorbed_,
                            LoadBank(load, {spec.head_dim - latent.rope_dim}, all(latent.rank),
                                     {heads, "k", std::nullopt}, false));
  MOESERVE_ASSIGN_OR_RETURN(a->value_, LoadBank(load, {latent.rank}, all(latent.value_dim),
                                                {heads, "v", std::nullopt}, false));
  MOESERVE_ASSIGN_OR_RETURN(
      a->output_, LoadLinear(load, spec.num_heads * latent.value_dim, {{prefix + ".o", d, false}},
                             /*bf16_rows=*/true));
  if (spec.gate) {
    MOESERVE_ASSIGN_OR_RETURN(
        a->gate_, LoadLinear(load, d, {{prefix + ".gate", spec.gates(), spec.gate_bias}},
                             /*bf16_rows=*/true));
  }
  if (spec.out_bias) {
    MOESERVE_ASSIGN_OR_RETURN(a->out_bias_, LoadVector(load, prefix + ".out_bias", d));
  }
  return a;
}

RowsView LatentAttention::Project(StepContext& ctx, const RowsView& x,
                                  const RowsView& latent) const {
  ctx.backend.Linear({.bank = latent_.get(), .input = x, .output = latent});
  const RowsView query =
      ctx.workspace.TakeDense(x.rows, int64_t{heads_} * spec_.head_dim, DType::kF32);
  RowsView input = x;
  if (query_down_ != nullptr) {
    const int rank = spec_.latent->query_rank;
    const RowsView down = ctx.workspace.Take(x.rows, rank, DType::kF32);
    input = ctx.workspace.Take(x.rows, rank, ctx.activation);
    ctx.backend.Linear({.bank = query_down_.get(), .input = x, .output = down});
    ctx.backend.Norm({.bank = query_norm_.get(), .input = down, .output = input});
  }
  ctx.backend.Linear({.bank = query_.get(), .input = input, .output = query});
  return query;
}

RowsView LatentAttention::Absorb(StepContext& ctx, const RowsView& query) const {
  const LatentSpec& latent = *spec_.latent;
  const int width = latent.rank + latent.rope_dim;
  const RowsView absorbed =
      ctx.workspace.TakeDense(query.rows, int64_t{heads_} * width, DType::kF32);
  RowsView input = query;
  if (ctx.activation != DType::kF32) {
    input = ctx.workspace.Take(query.rows, query.cols, ctx.activation);
    ctx.backend.Convert(query, input);
  }
  ctx.backend.Linear(
      {.bank = absorbed_.get(), .input = input, .output = absorbed, .segments = true});
  ctx.backend.Convert(
      SegmentColumns(query, heads_, spec_.head_dim - latent.rope_dim, latent.rope_dim),
      SegmentColumns(absorbed, heads_, latent.rank, latent.rope_dim));
  return absorbed;
}

void LatentAttention::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  const LatentSpec& spec = *spec_.latent;
  const RowDivision& division = ctx.division;
  const int64_t first = division.first_token();
  const RowsView own = division.Own(x);
  const RowsView latent = ctx.TakeGathered(x.rows, spec.rank + spec.rope_dim, DType::kF32);
  const RowsView query = Project(ctx, own, division.Own(latent));
  division.Gather(ctx.backend, latent);
  const RowsView vector = latent.Columns(0, spec.rank);
  ctx.backend.Norm({.bank = latent_norm_.get(), .input = vector, .output = vector});
  if (spec.scale != 1.0) ctx.backend.Scale(vector, static_cast<float>(spec.scale));
  if (key_rope_.dimensions > 0) {
    ctx.backend.Rope({.settings = key_rope_, .rows = latent.Columns(spec.rank, spec.rope_dim)});
    ctx.backend.Rope({.settings = query_rope_, .rows = query, .first_token = first});
  }
  if (spec_.query_scale.has_value()) {
    ctx.backend.ScaleByPosition(
        {.scale = ScaleOf(*spec_.query_scale), .rows = query, .first_token = first});
  }
  ctx.backend.AppendKv({.cache = &ctx.cache, .layer = layer_, .keys = latent, .values = {}});
  const RowsView sums = ctx.workspace.Take(own.rows, int64_t{heads_} * spec.rank, ctx.activation);
  ctx.backend.Attention({.cache = &ctx.cache,
                         .layer = layer_,
                         .causal = *spec_.causal,
                         .first_token = first,
                         .heads = heads_,
                         .scale = static_cast<float>(spec_.scale),
                         .soft_cap = static_cast<float>(spec_.soft_cap),
                         .window = spec_.window.value_or(0),
                         .chunks = spec_.window_kind == WindowKind::kChunk,
                         .query = Absorb(ctx, query),
                         .output = sums});
  const RowsView heads =
      ctx.workspace.Take(own.rows, int64_t{heads_} * spec.value_dim, ctx.activation);
  ctx.backend.Linear({.bank = value_.get(), .input = sums, .output = heads, .segments = true});
  if (gate_ != nullptr) {
    const RowsView gate = ctx.workspace.Take(own.rows, spec_.gates(), DType::kF32);
    ctx.backend.Linear({.bank = gate_.get(), .input = own, .output = gate});
    ctx.backend.MultiplyByGate(heads, gate, spec_.gate_activation);
  }
  ctx.backend.Linear({.bank = output_.get(), .input = heads, .output = division.Own(output)});
  division.Gather(ctx.backend, output);
}

}  // namespace moeserve

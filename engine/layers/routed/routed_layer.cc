#include "engine/layers/routed/routed_layer.h"

#include <algorithm>

#include "base/check.h"
#include "engine/layers/routed/rank_places.h"
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

// Returns the part of a plan that belongs to the rows [first, first + count). Assignments keep
// their numbers.
RoutingPlan RowsOfPlan(const RoutingPlan& plan, int64_t first, int64_t count) {
  RoutingPlan part = plan;
  part.rows = static_cast<int>(count);
  part.row_offsets = plan.row_offsets + first;
  return part;
}

// Returns what follows layer i of a projection of `count` linear layers.
Activation BetweenLayers(size_t i, size_t count) {
  return i + 1 < count ? ActivationKind::kRelu : ActivationKind::kNone;
}

}  // namespace

Result<std::unique_ptr<RoutedLayer>> RoutedLayer::Load(LoadContext& load, const ModelSpec& model,
                                                       int block,
                                                       std::unique_ptr<ExpertBody> body) {
  const BlockSpec& block_spec = model.blocks[static_cast<size_t>(block)];
  const RoutedLayerSpec& spec = *block_spec.routing();
  const std::string prefix = block_spec.name();
  const int model_width = model.hidden_size;
  auto routed = std::make_unique<RoutedLayer>();
  routed->slot_ = block;
  routed->stack_ = model.stack;
  routed->layer_ = block_spec.layer;
  routed->block_ = block_spec.kind();
  routed->heads_ = spec.split.heads;
  routed->residual_ = spec.split.residual;
  routed->scores_stream_ = spec.score.stream;
  routed->weight_input_ = spec.weight_input;
  routed->body_ = std::move(body);
  if (load.tiers != nullptr) {
    routed->tier_ = load.tiers->NewBlock(routed->body_->banks());
  }
  if (load.ranks != nullptr) {
    routed->places_ = std::make_unique<RankPlaces>(*load.ranks, model, block);
  } else {
    routed->places_ = std::make_unique<LocalPlace>();
  }
  MOESERVE_ASSIGN_OR_RETURN(
      routed->router_, LoadRouter(load, prefix + ".router", spec, model_width / spec.split.heads));
  MOESERVE_RETURN_IF_ERROR(routed->LoadProjections(load, prefix, spec, model_width));
  const int width = spec.latent_width > 0 ? spec.latent_width : model_width / spec.split.heads;
  MOESERVE_RETURN_IF_ERROR(routed->LoadNullExperts(load, prefix, spec, width));
  return routed;
}

absl::Status RoutedLayer::LoadProjections(LoadContext& load, const std::string& prefix,
                                          const RoutedLayerSpec& spec, int model_width) {
  const SplitSpec& split = spec.split;
  const auto load_layers = [&](const std::string& name,
                               std::vector<std::unique_ptr<LinearBank>>& layers) -> absl::Status {
    for (int i = 0; i < split.depth; ++i) {
      const std::string layer = split.depth == 1 ? name : name + "." + std::to_string(i);
      MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                                LoadLinear(load, model_width, {{layer, model_width, split.bias}}));
      layers.push_back(std::move(bank));
    }
    return absl::OkStatus();
  };
  if (split.projection) {
    MOESERVE_RETURN_IF_ERROR(load_layers(prefix + ".split", split_));
  }
  if (split.merge_projection) {
    MOESERVE_RETURN_IF_ERROR(load_layers(prefix + ".merge", merge_));
  }
  if (spec.latent_width == 0) return absl::OkStatus();
  const int row = model_width / split.heads;
  MOESERVE_ASSIGN_OR_RETURN(
      latent_down_, LoadLinear(load, row, {{prefix + ".latent_down", spec.latent_width, false}}));
  MOESERVE_ASSIGN_OR_RETURN(
      latent_up_, LoadLinear(load, spec.latent_width, {{prefix + ".latent_up", row, false}}));
  return absl::OkStatus();
}

absl::Status RoutedLayer::LoadNullExperts(LoadContext& load, const std::string& prefix,
                                          const RoutedLayerSpec& spec, int width) {
  if (spec.null_experts.total() == 0) return absl::OkStatus();
  const int places = null_.places = spec.num_places();
  null_.first = spec.null_experts.replaced.empty() ? places : spec.null_experts.replaced.front();
  std::vector<int32_t> sources;
  std::vector<float> values;
  int32_t constants = 0;
  for (int e = 0; e < spec.num_experts; ++e) {
    if (spec.BodyOf(e) >= 0) {
      sources.push_back(kAssignNothing);
      continue;
    }
    if (!spec.IsConstant(e)) {
      sources.push_back(e < places + spec.null_experts.zero ? kAssignZeros : kAssignInput);
      continue;
    }
    MOESERVE_ASSIGN_OR_RETURN(
        const HostTensor tensor,
        load.source.Get(prefix + ".experts." + std::to_string(e) + ".constant", {width}));
    for (int i = 0; i < width; ++i) values.push_back(ElementAsF32(tensor, i));
    sources.push_back(constants++);
  }
  MOESERVE_ASSIGN_OR_RETURN(null_.sources, load.backend.Upload(sources));
  if (values.empty()) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(null_.constants, load.backend.Upload(values));
  return absl::OkStatus();
}

RowsView RoutedLayer::Split(StepContext& ctx, const RowsView& x) const {
  if (split_.empty()) return AsSubTokens(x, heads_);
  // The norm of all rows comes before the product of some.
  if (ctx.division.divided()) ctx.RunLeftNorm();
  const RowsView all = ctx.workspace.TakeDense(x.rows, x.cols, ctx.activation);
  RowsView rows = ctx.division.Own(x);
  for (size_t i = 0; i < split_.size(); ++i) {
    const RowsView projected = i + 1 == split_.size()
                                   ? ctx.division.Own(all)
                                   : ctx.workspace.TakeDense(rows.rows, rows.cols, ctx.activation);
    ctx.WithLeftNorm([&](const AddNormArgs* norm) {
      ctx.backend.Linear({.bank = split_[i].get(),
                          .input = rows,
                          .output = projected,
                          .activation = BetweenLayers(i, split_.size()),
                          .norm = norm});
    });
    rows = projected;
  }
  ctx.division.Gather(ctx.backend, all);
  return AsSubTokens(all, heads_);
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
    const RouteOverride change = control->For(stack_, layer_, block_);
    std::fill_n(overrides.begin() + static_cast<std::ptrdiff_t>(t) * heads_, heads_, change);
  }
  return overrides;
}

RoutingPlan RoutedLayer::Select(StepContext& ctx, const RowsView& rows) const {
  const std::vector<RouteOverride> overrides = Overrides(ctx);
  const ReportedRows& reported = ctx.reported.of_slot(slot_);
  const RowsView& input = scores_stream_ ? ctx.stream : rows;
  RouteArgs args{
      .router = router_.get(),
      .input = input,
      .given = ctx.batch.given.empty() ? nullptr : ctx.batch.given[static_cast<size_t>(slot_)],
      .slot = slot_,
      .scores = reported.scores.data != nullptr ? &reported.scores : nullptr,
      .overrides = overrides};
  const RoutingPlan plan = ctx.WithLeftNorm([&](const AddNormArgs* norm) {
    args.norm = norm;
    return ctx.backend.Route(args);
  });
  if (reported.inputs.data != nullptr) ctx.backend.Convert(input, reported.inputs);
  const RoutingControl* control = ctx.batch.controls.empty() ? nullptr : ctx.batch.controls[0];
  if (control == nullptr || control->row_limit() == nullptr) return plan;
  const GivenRoutes kept = control->row_limit()->Apply(slot_, plan);
  return ctx.backend.Route(
      {.router = router_.get(), .input = input, .given = &kept, .slot = slot_});
}

RoutedLayer::Results RoutedLayer::RunExperts(StepContext& ctx, const RoutingPlan& plan,
                                             const RowsView& rows, bool outputs_gathered) const {
  RowsView inputs = rows;
  if (latent_down_ != nullptr) {
    inputs = ctx.TakeGathered(rows.rows, latent_down_->shape().out_features[0], ctx.activation);
    ctx.backend.Linear({.bank = latent_down_.get(),
                        .input = ctx.division.Own(rows),
                        .output = ctx.division.Own(inputs)});
    ctx.division.Gather(ctx.backend, inputs);
  }
  const bool all_have_bodies = null_.sources == nullptr;
  const RoutingPlan bodies = all_have_bodies || null_.places == plan.num_experts
                                 ? plan
                                 : ctx.backend.FirstExperts(plan, null_.places);
  const int64_t width = body_->ResultWidth(inputs.cols);
  const int64_t output_width = heads_ * (latent_up_ != nullptr ? rows.cols : width);
  PlacedPlan placed =
      places_->Divide(ctx, plan, bodies,
                      {.tokens = rows.rows / heads_,
                       .result_bytes = width * static_cast<int64_t>(SizeOf(ctx.activation)),
                       .output_bytes = output_width * static_cast<int64_t>(sizeof(float)),
                       .outputs_gathered = outputs_gathered});
  RoutingPlan& here = placed.parts.local;
  const Results results{
      .plan = placed.parts.joint,
      .rows = ctx.workspace.Take(placed.parts.joint.capacity, width, ctx.activation),
      .sums = placed.sums};
  {
    const Workspace::Scope scope(ctx.workspace);
    const RowsView own = placed.sums.divided()
                             ? ctx.workspace.Take(here.capacity, width, ctx.activation)
                             : results.rows.Rows(placed.parts.first, here.capacity);
    const auto run = [&](const RoutingPlan& some, int64_t first) {
      const PartTimer timer(ctx.times, &StepTimes::experts);
      body_->Run(ctx, some, inputs, own.Rows(first, some.capacity));
      ctx.left_append = nullptr;  // the keys of all rows are in the cache now
    };
    if (tier_ == nullptr) {
      run(here, 0);
    } else {
      // A part for all experts of this place has the first ids of the plan of all.
      const RoutingPlan& whole = here.row_offsets != nullptr ? here : results.plan;
      const auto& phases = ctx.batch.phase;
      const bool prompt = std::ranges::find(phases, Phase::kPrefill) != phases.end();
      tier_->RunProducts(whole, here, prompt, run);
    }
    places_->Collect(ctx, placed, own, results.rows);
  }
  if (all_have_bodies) return results;
  ctx.backend.AssignRows({.plan = &results.plan,
                          .sources = static_cast<const int32_t*>(null_.sources->data()),
                          .first = null_.first,
                          .constants = null_.constants == nullptr
                                           ? nullptr
                                           : static_cast<const float*>(null_.constants->data()),
                          .input = results.sums.Own(inputs),
                          .output = results.rows});
  return results;
}

void RoutedLayer::CombineAndMerge(StepContext& ctx, const Results& results, const RowsView& rows,
                                  const RowsView& output, RowDivision* left) const {
  const bool own_sums = results.sums.divided();
  if (ctx.left_sum != nullptr && output.data == ctx.left_rows.data && !projects() && heads_ == 1 &&
      !own_sums) {
    *ctx.left_sum = {.plan = results.plan,
                     .results = results.rows,
                     .residual = residual_ ? std::optional(rows) : std::nullopt,
                     .weighted = !weight_input_};
    return;
  }
  const RowDivision division = own_sums ? results.sums : projects() ? ctx.division : RowDivision();
  // Rows that are gathered have no padding.
  const bool copies = own_sums && output.stride != output.cols;
  const RowsView whole =
      copies ? ctx.workspace.TakeDense(output.rows, output.cols, DType::kF32) : output;
  const RowsView own = division.Own(whole);
  const RoutingPlan own_plan =
      own_sums ? results.plan
               : RowsOfPlan(results.plan, division.first_token() * heads_, own.rows * heads_);
  const RowsView own_rows = division.Own(rows);
  RowsView combined = own;
  if (!merge_.empty()) {
    combined = ctx.workspace.TakeDense(own.rows, own.cols, ctx.activation);
  }
  const RowsView sub_tokens = AsSubTokens(combined, heads_);
  RowsView sums = sub_tokens;
  if (latent_up_ != nullptr) {
    sums = ctx.workspace.Take(sub_tokens.rows, results.rows.cols, ctx.activation);
  }
  const CombineArgs sum{.plan = &own_plan,
                        .results = results.rows,
                        .residual = residual_ ? &own_rows : nullptr,
                        .output = sums,
                        .weighted = !weight_input_};
  if (latent_up_ != nullptr) {
    ctx.backend.Linear(
        {.bank = latent_up_.get(), .input = sums, .output = sub_tokens, .sum = &sum});
  } else if (merge_.empty()) {
    ctx.backend.Combine(sum);
  }
  for (size_t i = 0; i < merge_.size(); ++i) {
    const bool last = i + 1 == merge_.size();
    const RowsView merged =
        last ? own : ctx.workspace.TakeDense(own.rows, own.cols, ctx.activation);
    ctx.backend.Linear({.bank = merge_[i].get(),
                        .input = combined,
                        .output = merged,
                        .activation = BetweenLayers(i, merge_.size()),
                        .sum = i == 0 && latent_up_ == nullptr ? &sum : nullptr});
    combined = merged;
  }
  if (left != nullptr) {
    *left = division;
    return;
  }
  division.Gather(ctx.backend, whole);
  if (copies) ctx.backend.Convert(whole, output);
}

RoutedLayer::RoutedRows RoutedLayer::Route(StepContext& ctx, const RowsView& x) const {
  const RowsView rows = Split(ctx, x);
  return {rows, Select(ctx, rows)};
}

void RoutedLayer::RunRouted(StepContext& ctx, const RoutedRows& routed, const RowsView& output,
                            RowDivision* left) const {
  const bool outputs_gathered = ctx.division.divided() && (projects() || left != nullptr);
  const Results results = RunExperts(ctx, routed.plan, routed.rows, outputs_gathered);
  CombineAndMerge(ctx, results, routed.rows, output, left);
}

}  // namespace moeserve

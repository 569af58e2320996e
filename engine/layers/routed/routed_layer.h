// The routed layer: split -> score -> gate -> select -> dispatch -> experts -> combine -> merge.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/layers/load_weights.h"
#include "engine/layers/routed/expert_body.h"
#include "engine/layers/step_context.h"

namespace moeserve {

// One code path for SMoE, X-MoE, MH-MoE, MoA and HMoE: the papers' models differ in their settings
// (spec.h) and in the kind of ExpertBody. Immutable after loading.
class RoutedLayer {
 public:
  // `prefix` is "blocks.N.attention" or "blocks.N.feed_forward". `body` computes rows of width
  // model_width / split heads.
  static Result<std::unique_ptr<RoutedLayer>> Load(LoadContext& load, const std::string& prefix,
                                                   int layer, BlockKind block,
                                                   const RoutedLayerSpec& spec, int model_width,
                                                   std::unique_ptr<ExpertBody> body);

  // Routes the tokens `x` [T, d] (activation type) and writes the weighted sum of their experts'
  // outputs [T, d] (f32) to `output`.
  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const;

 private:
  RowsView Split(StepContext& ctx, const RowsView& x) const;
  // Returns one routing override per row; empty if no sequence of the step has one.
  std::vector<RouteOverride> Overrides(const StepContext& ctx) const;
  // Runs the stages score, gate and select.
  RoutingPlan Route(StepContext& ctx, const RowsView& rows) const;
  // Sums the experts' outputs for every row, merges sub-tokens and applies the merge projection.
  void CombineAndMerge(StepContext& ctx, const RoutingPlan& plan, const RowsView& results,
                       const RowsView& rows, const RowsView& output) const;

  std::unique_ptr<Router> router_;
  std::unique_ptr<ExpertBody> body_;
  // Projections before the split into sub-tokens and after the merge; null if the layer has none.
  std::unique_ptr<LinearBank> split_;
  std::unique_ptr<LinearBank> merge_;
  int slot_ = 0;  // PlanSlot() of this layer's routing plans
  int layer_ = 0;
  BlockKind block_ = BlockKind::kFeedForward;
  int heads_ = 1;
  bool residual_ = false;
};

}  // namespace moeserve

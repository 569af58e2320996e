// The routed layer: split -> score -> gate -> select -> dispatch -> experts -> combine -> merge.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/layers/load_weights.h"
#include "engine/layers/routed/expert_body.h"
#include "engine/layers/step_context.h"

namespace moeserve {

// One code path for SMoE, X-MoE, MH-MoE, MoA and HMoE: the papers are settings (spec.h) and the
// body's kind. Immutable after loading.
class RoutedLayer {
 public:
  // `prefix` is "blocks.N.attention" or "blocks.N.feed_forward"; `body` works on rows of
  // model_width / split heads.
  static Result<std::unique_ptr<RoutedLayer>> Load(LoadContext& load, const std::string& prefix,
                                                   int layer, BlockKind block,
                                                   const RoutedLayerSpec& spec, int model_width,
                                                   std::unique_ptr<ExpertBody> body);

  // Routes the tokens `x` [T, d] (activation type) and writes their sum [T, d] (f32) to `output`.
  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const;

 private:
  RowsView Split(StepContext& ctx, const RowsView& x) const;
  // One for each row; empty where no sequence of the step changes its routing.
  std::vector<RouteOverride> Overrides(const StepContext& ctx) const;
  // Scores, gates and selects.
  RoutingPlan Route(StepContext& ctx, const RowsView& rows) const;
  // Sums the experts' results for every row, merges sub-tokens and projects them.
  void CombineAndMerge(StepContext& ctx, const RoutingPlan& plan, const RowsView& results,
                       const RowsView& rows, const RowsView& output) const;

  std::unique_ptr<Router> router_;
  std::unique_ptr<ExpertBody> body_;
  // Projections before the split into sub-tokens and after the merge; null if the layer has none.
  std::unique_ptr<LinearBank> split_;
  std::unique_ptr<LinearBank> merge_;
  int slot_ = 0;  // PlanSlot() of the layer's plans
  int layer_ = 0;
  BlockKind block_ = BlockKind::kFeedForward;
  int heads_ = 1;
  bool residual_ = false;
};

}  // namespace moeserve

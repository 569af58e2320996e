// The routed layer: split -> score -> gate -> select -> dispatch -> experts -> combine -> merge.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/layers/routed/expert_body.h"
#include "engine/layers/routed/expert_places.h"
#include "engine/step/step_context.h"
#include "engine/tiers/expert_tiers.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// One code path for SMoE, X-MoE, MH-MoE, MoA and HMoE: the papers' models differ in their settings
// (spec.h) and in the kind of ExpertBody. Immutable after loading.
class RoutedLayer {
 public:
  // Loads the routed layer of a block (an index in ModelSpec::blocks). `body` computes the experts
  // that have matrices, on rows of the width `latent_width`, or hidden_size / split heads if that
  // is 0.
  static Result<std::unique_ptr<RoutedLayer>> Load(LoadContext& load, const ModelSpec& model,
                                                   int block, std::unique_ptr<ExpertBody> body);

  // Routes the tokens `x` [T, d] (activation type) and writes the weighted sum of their experts'
  // outputs [T, d] (f32) to `output`. If `left` is not null, it may write the own rows of a
  // division only, which it sets *left to; the caller then gathers them.
  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output,
               RowDivision* left = nullptr) const {
    const Workspace::Scope scope(ctx.workspace);
    RunRouted(ctx, Route(ctx, x), output, left);
  }

  // The rows of a step and the experts that compute them.
  struct RoutedRows {
    RowsView rows;
    RoutingPlan plan;
  };
  // The two parts of Forward(). The memory that they take from the workspace is the caller's.
  RoutedRows Route(StepContext& ctx, const RowsView& x) const;
  void RunRouted(StepContext& ctx, const RoutedRows& routed, const RowsView& output,
                 RowDivision* left = nullptr) const;

  // What computes the experts.
  const ExpertBody& body() const { return *body_; }

  // Whether the first operation of Route() is one that Branch::TakesNorm() names.
  bool TakesNorm() const { return !split_.empty() || !scores_stream_; }

 private:
  // The experts without matrices.
  struct NullRows {
    int places = 0;                           // RoutedLayerSpec::num_places()
    int first = 0;                            // the first of these experts
    std::unique_ptr<DeviceBuffer> sources;    // AssignRowsArgs::sources; null without such experts
    std::unique_ptr<DeviceBuffer> constants;  // f32 [constant experts, c]; null if there are none
  };
  absl::Status LoadNullExperts(LoadContext& load, const std::string& prefix,
                               const RoutedLayerSpec& spec, int width);
  absl::Status LoadProjections(LoadContext& load, const std::string& prefix,
                               const RoutedLayerSpec& spec, int model_width);

  RowsView Split(StepContext& ctx, const RowsView& x) const;
  // The results of experts.
  struct Results {
    RoutingPlan plan;
    RowsView rows;  // one per assignment of the plan
    // If divided, the plan has this rank's own rows only.
    RowDivision sums;
  };
  // Returns the results that this rank combines. `outputs_gathered`: see PlacedRows.
  Results RunExperts(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
                     bool outputs_gathered) const;
  // Whether products follow the sums.
  bool projects() const { return !merge_.empty() || latent_up_ != nullptr; }
  // Returns one routing override per row; empty if no sequence of the step has one.
  std::vector<RouteOverride> Overrides(const StepContext& ctx) const;
  // Runs the stages score, gate and select.
  RoutingPlan Select(StepContext& ctx, const RowsView& rows) const;
  // Sums the experts' outputs for every row, merges sub-tokens and applies the merge projection.
  // `left` as in Forward().
  void CombineAndMerge(StepContext& ctx, const Results& results, const RowsView& rows,
                       const RowsView& output, RowDivision* left) const;

  std::unique_ptr<Router> router_;
  std::unique_ptr<ExpertBody> body_;
  std::unique_ptr<const ExpertPlaces> places_;
  std::unique_ptr<BlockTier> tier_;  // null: all experts are in the device's memory
  // The linear layers of the projections before the split into sub-tokens and after the merge;
  // empty if there is no such projection.
  std::vector<std::unique_ptr<LinearBank>> split_;
  std::vector<std::unique_ptr<LinearBank>> merge_;
  // Projections to the width of the experts and back; null if this is the width of the rows.
  std::unique_ptr<LinearBank> latent_down_;
  std::unique_ptr<LinearBank> latent_up_;
  NullRows null_;
  int slot_ = 0;  // RoutedBlock::slot
  Stack stack_ = Stack::kOnly;
  int layer_ = 0;
  BlockKind block_ = BlockKind::kFeedForward;
  int heads_ = 1;
  bool residual_ = false;
  bool scores_stream_ = false;  // ScoreSpec::stream
  bool weight_input_ = false;
};

}  // namespace moeserve

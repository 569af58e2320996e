// Stage "experts": the computation between an expert's first and last matrix.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/layers/load_weights.h"
#include "engine/layers/step_context.h"

namespace moeserve {

// The only polymorphic part of the routed layer. Immutable after loading.
class ExpertBody {
 public:
  virtual ~ExpertBody() = default;
  // Results [capacity, width] of every assignment of `plan`, in assignment order and in the run's
  // activation type; with no plan, of every row by the single expert. `rows` [R, width] in the
  // activation type. The memory comes from ctx.workspace.
  virtual RowsView Run(StepContext& ctx, const RoutingPlan* plan, const RowsView& rows) const = 0;
};

// down(norm(act(gate x) * up x)), or without gate, or without norm. Widths may differ by expert
// (HMoE); a dense or shared feed-forward is a body of one expert.
class FeedForwardExperts : public ExpertBody {
 public:
  static Result<std::unique_ptr<FeedForwardExperts>> Load(LoadContext& load,
                                                          const std::vector<std::string>& prefixes,
                                                          const ExpertSpec& spec,
                                                          const std::vector<int>& widths,
                                                          int model_width);
  RowsView Run(StepContext& ctx, const RoutingPlan* plan, const RowsView& rows) const override;
  // Run() for a body of one expert that writes f32 rows instead.
  void RunDense(StepContext& ctx, const RowsView& rows, const RowsView& output) const;

 private:
  RowsView Hidden(StepContext& ctx, const RoutingPlan* plan, const RowsView& rows) const;

  std::unique_ptr<LinearBank> up_;  // gate and up together where gated
  std::unique_ptr<LinearBank> down_;
  std::unique_ptr<NormBank> inner_norm_;  // null: none
  ActivationKind activation_ = ActivationKind::kNone;
  int widest_ = 0;
};

// MoA ("Mixture of Attention Heads", eq. 5 to 8): an expert is a set of query heads with its own
// output projection; keys and values are shared and already in the cache.
class AttentionExperts : public ExpertBody {
 public:
  static Result<std::unique_ptr<AttentionExperts>> Load(LoadContext& load,
                                                        const std::string& prefix, int layer,
                                                        const AttentionSpec& spec,
                                                        const PositionSpec& position,
                                                        int model_width);
  RowsView Run(StepContext& ctx, const RoutingPlan* plan, const RowsView& rows) const override;

 private:
  std::unique_ptr<LinearBank> query_;
  std::unique_ptr<LinearBank> output_;
  int heads_ = 1;      // of an expert; head j reads kv head j
  RopeSettings rope_;  // dimensions 0: none
  int layer_ = 0;
  float scale_ = 1.0f;
  int window_ = 0;
};

// Rope settings of an attention block; dimensions 0 where the model has no rope.
RopeSettings RopeOf(const PositionSpec& position, int head_dim);

}  // namespace moeserve

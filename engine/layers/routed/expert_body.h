// Stage "experts": what an expert computes from its input rows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/step/step_context.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Computes the experts of a routed layer; the only polymorphic part of that layer. Immutable after
// loading, except for which experts the banks have.
class ExpertBody {
 public:
  virtual ~ExpertBody() = default;
  // Returns the width of the experts' outputs for rows of the width `row_width`.
  virtual int64_t ResultWidth(int64_t row_width) const { return row_width; }
  // Writes the experts' outputs to `results` [plan.capacity, ResultWidth()], one row per assignment
  // of `plan`, in the order of the assignments. `rows` [R, width] and `results` are in the
  // activation type.
  virtual void Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
                   const RowsView& results) const = 0;
  // Returns the banks of which Run() reads the experts that have rows in its plan, always in the
  // same order.
  virtual std::vector<LinearBank*> banks() const = 0;
};

// Computes down(norm(act(gate x) * up x)), or down(norm(act(up x))) without a gate; the norm is
// optional. With ExpertSpec::residual, an expert is a stack of such networks f, each with a norm
// before it: x + f(norm(x)). Widths may differ between experts (HMoE). A dense or shared
// feed-forward is a body with one expert.
class FeedForwardExperts : public ExpertBody {
 public:
  // Experts of width 0 have no tensors, and their rows are not written. `routed` is that of
  // LoadBank(); null: the body runs without a plan. Norms, which are small, are loaded for all
  // experts, so that matrices can be moved here.
  static Result<std::unique_ptr<FeedForwardExperts>> Load(
      LoadContext& load, const std::vector<std::string>& prefixes, const ExpertSpec& spec,
      const std::vector<int>& widths, int model_width, const RoutedExperts* routed = nullptr);
  // Experts get their rows times the weights of the plan.
  void WeightInputs() { weight_inputs_ = true; }
  void Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
           const RowsView& results) const override;
  std::vector<LinearBank*> banks() const override;
  // Lets the only expert compute every row, and writes f32 rows to `output`.
  void RunDense(StepContext& ctx, const RowsView& rows, const RowsView& output) const;

 private:
  // One network of every expert.
  struct Sublayer {
    std::unique_ptr<NormBank> norm;  // null without ExpertSpec::residual
    std::unique_ptr<LinearBank> up;  // gate and up together if the experts are gated
    std::unique_ptr<LinearBank> down;
    std::unique_ptr<NormBank> inner_norm;  // null if there is none
  };
  static Result<Sublayer> LoadSublayer(LoadContext& load, const std::vector<std::string>& prefixes,
                                       const ExpertSpec& spec, const std::vector<int>& widths,
                                       int model_width, const RoutedExperts* routed);

  // Computes one network without its norm. Without a plan, the only expert computes every row. With
  // `gather`, `rows` are the rows of the plan, else they are its assignments.
  void Compute(StepContext& ctx, const Sublayer& sublayer, const RoutingPlan* plan, bool gather,
               const RowsView& rows, const RowsView& output) const;
  // Returns the inputs [count, width] of the down matrices.
  RowsView Hidden(StepContext& ctx, const Sublayer& sublayer, const RoutingPlan* plan, bool gather,
                  const RowsView& rows, int64_t count) const;
  // Computes the stack of all sub-layers and writes f32 rows to `stack`.
  void ComputeStack(StepContext& ctx, const RoutingPlan* plan, const RowsView& rows,
                    const RowsView& stack) const;

  std::vector<Sublayer> sublayers_;
  bool residual_ = false;
  bool weight_inputs_ = false;
  Activation activation_;
  int widest_ = 0;
};

}  // namespace moeserve

// Routers, and the routing plans of a step: how they are made, kept and counted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

// The tensors of a router in the CPU's layout.
class CpuRouter : public Router {
 public:
  CpuRouter(const RouteSettings& settings, const RouterTensors& tensors);

  const RouteSettings& settings() const { return settings_; }
  // Returns the choice biases [E]; null if there are none.
  const float* choice_bias() const { return choice_bias_.empty() ? nullptr : choice_bias_.data(); }
  // Returns the factors of the experts' weights [E]; null if there are none.
  const float* expert_scale() const {
    return expert_scale_.empty() ? nullptr : expert_scale_.data();
  }
  // Returns the experts [k] that the table lists for a token; null if there is no table.
  const int32_t* TableRow(int32_t token) const {
    return table_.empty() ? nullptr : table_.data() + int64_t{token} * settings_.k;
  }
  // Computes the row `out` [input_width] that has the scores of the row `x`; needed only if
  // ChangesRow() is true. `out` may be `x`.
  void ChangeRow(const float* x, float* out, const KernelTable& table) const;
  // The most rows that Scores() takes.
  static constexpr int kMaxRows = 4;
  // Returns the size of the scratch memory that Scores() needs, in floats.
  size_t scratch_floats() const {
    return static_cast<size_t>(kMaxRows) * static_cast<size_t>(std::max(settings_.dim, 1));
  }
  // Computes the scores[r] [E] of each row x[r] [input_width], which ChangeRow() has changed, after
  // bias and temperature.
  void Scores(std::span<const float* const> x, float* scratch, float* const* scores,
              const KernelTable& table) const;

 private:
  RouteSettings settings_;
  // In the layout for contract_dots. `weights_` has vectors of input_width elements: E of a dot
  // router, dim of a cosine router. `experts_` has E vectors of dim elements of a cosine router,
  // normalised if the settings ask for it.
  std::vector<float> weights_, experts_;
  std::vector<float> bias_;  // dot router: [E]; cosine router: [dim]; empty if there is none
  std::vector<float> choice_bias_;
  std::vector<float> row_weight_;
  std::vector<float> expert_scale_;
  std::vector<int32_t> table_;
  float temperature_ = 1.0f;  // result of ResolvedTemperature()
};

// The routers of all arguments are CpuRouters and the counters CpuRouteCounters. Only the backend's
// thread calls these functions.
class RoutingOps {
 public:
  // All arguments must outlive this object. `step` has the inputs of the current step.
  RoutingOps(const KernelTable& table, Workers& workers, const StepInputs& step)
      : table_(table),
        workers_(workers),
        step_(step),
        scratch_(static_cast<size_t>(workers.threads())) {}

  // Must be called when a step begins, after its inputs have changed.
  void BeginStep();
  RoutingPlan Route(const RouteArgs& args);
  // Returns the slot's last plan.
  const RoutingPlan& plan(int slot) const { return slots_[slot].plan; }
  // Adds the step's plans to its counters. `kind` is [T]. Returns routes().
  std::span<const TokenRoutes> CountRoutes(std::span<const uint8_t> kind);
  // StepOutcome::routes and failed of the step, valid until the next one. There are no routes
  // before CountRoutes().
  std::span<const TokenRoutes> routes() const { return routes_; }
  std::span<const uint8_t> failed() const { return failed_; }

 private:
  // A routing plan and its memory, which grows and never shrinks.
  struct PlanSlot {
    std::vector<int32_t> expert_offsets, expert_of_assignment, row_of_assignment, row_offsets,
        assignments_of_row;
    std::vector<float> weight_of_assignment;
    std::vector<uint8_t> row_nonfinite;
    RoutingPlan plan;
    bool routed = false;  // whether `plan` was computed in this step
  };
  // Memory of one thread; grows and never shrinks.
  struct Scratch {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> orders;
  };

  // Selects the experts of all rows. The counts_[r] experts and weights of row r are stored from
  // index r * widest on in chosen_.
  void SelectRows(const RouteArgs& args, int widest, std::vector<uint8_t>& row_nonfinite);
  // Returns the row [input_width] whose scores select the experts: the input's, or `changed`, to
  // which it is written in f32 if it differs from it.
  const float* RouterInput(const RouteArgs& args, const CpuRouter& router, int64_t row,
                           float* changed) const;
  // Selects the experts of one row with these scores [E], for SelectRows(). `listed` has the
  // experts that a table lists, or is null; `values` is memory for two floats per expert.
  void SelectRow(const RouteArgs& args, const CpuRouter& router, int64_t row, const int32_t* listed,
                 float* scores, float* values, int widest, Scratch& scratch, uint8_t* nonfinite);
  // Marks as failed the tokens that have a row without a finite largest score.
  void MarkFailed(std::span<const uint8_t> row_nonfinite);
  void BuildPlan(int rows, int experts, const GivenRoutes& routes, PlanSlot& slot);

  const KernelTable& table_;
  Workers& workers_;
  const StepInputs& step_;
  std::vector<Scratch> scratch_;  // [threads]
  std::vector<PlanSlot> slots_;
  std::vector<uint8_t> failed_;                    // [T]
  std::vector<TokenRoutes> routes_;                // [T]
  std::vector<const RoutingPlan*> counted_plans_;  // scratch of CountRoutes()
  // The routes of the current Route() call, before they are sorted into a plan.
  GivenRoutes chosen_;
  std::vector<int32_t> counts_;  // [rows] the routes of each row
};

}  // namespace moeserve::cpu

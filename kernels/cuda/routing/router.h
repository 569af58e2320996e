// Routing on the device: computes scores, selection, gates and the routing plan with the same bits
// as the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/routing.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_variant.h"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {

class CudaRouter : public Router {
 public:
  // Widens the tensors to f32, normalises the expert vectors, and stores all tensors in the
  // kernels' layout. InvalidArgument if the router exceeds the limits of the kernels;
  // ResourceExhausted if memory runs out.
  static Result<std::unique_ptr<CudaRouter>> Create(const RouteSettings& settings,
                                                    const RouterTensors& tensors);

  const RouteSettings& settings() const { return tables_.settings; }
  const RouterTables& tables() const { return tables_; }

 private:
  CudaRouter() = default;

  RouterTables tables_;
  DeviceMemory weights_;
  DeviceMemory bias_;
  DeviceMemory experts_;
  DeviceMemory choice_bias_;
  DeviceMemory row_weight_;
  DeviceMemory expert_scale_;
  DeviceMemory table_;
};

// The device arrays of one RoutingPlan. The launches that write a plan and those that read it must
// use the same stream.
class PlanMemory {
 public:
  // Allocates arrays for `max_rows` rows of up to `k_max` routes each. ResourceExhausted if memory
  // runs out.
  static Result<PlanMemory> Create(int max_rows, int k_max, int num_experts);
  // Grows the arrays if necessary. Must not be called between the launch and the end of a step that
  // uses them.
  Status Reserve(int max_rows, int k_max, int num_experts);

  PlanArrays arrays() const;
  int max_rows() const { return max_rows_; }
  int64_t capacity() const { return capacity_; }
  int num_experts() const { return num_experts_; }
  // Returns the plan for readers. All plans in this memory have the same addresses until the next
  // Reserve().
  RoutingPlan Plan(int rows, int num_experts, int k_max) const;

 private:
  int max_rows_ = -1;
  int64_t capacity_ = 0;
  int num_experts_ = 0;
  DeviceMemory expert_offsets_, expert_of_assignment_, row_of_assignment_, weight_of_assignment_;
  DeviceMemory row_offsets_, assignments_of_row_, row_nonfinite_;
};

// Returns the number of elements of a row that LaunchRoute() stores before it computes the
// products; 0 if it reads the input rows as they are.
inline int ChangedWidth(const RouteSettings& settings) {
  return ChangesRow(settings) ? settings.input_width : 0;
}

// Intermediate results that one routing kernel writes and the next one reads. All MoE blocks whose
// routing runs on the same stream share them.
class RouteScratch {
 public:
  // `max_columns` is the largest tables().columns of all routers; `max_width` the largest
  // ChangedWidth() of their settings. ResourceExhausted if memory runs out.
  static Result<RouteScratch> Create(int max_rows, int k_max, int num_experts, int max_columns,
                                     int max_width = 0);
  Status Reserve(int max_rows, int k_max, int num_experts, int max_columns, int max_width = 0);

  int max_rows() const { return max_rows_; }
  int64_t max_routes() const { return max_routes_; }
  int64_t max_products() const { return max_products_; }
  int64_t max_changed() const { return max_changed_; }
  int num_experts() const { return num_experts_; }
  float* changed_rows() const { return changed_rows_.as<float>(); }
  float* products() const { return products_.as<float>(); }
  int32_t* experts() const { return experts_.as<int32_t>(); }
  float* weights() const { return weights_.as<float>(); }
  int32_t* counts() const { return counts_.as<int32_t>(); }
  int32_t* chunk_counts() const { return chunk_counts_.as<int32_t>(); }
  int32_t* arrivals() const { return arrivals_.as<int32_t>(); }

 private:
  int max_rows_ = -1;
  int64_t max_routes_ = 0;
  int64_t max_products_ = 0;
  int64_t max_changed_ = 0;
  int num_experts_ = 0;
  DeviceMemory changed_rows_;  // [rows, width]
  DeviceMemory products_;      // [rows, columns]
  DeviceMemory experts_;       // [rows, k_max]
  DeviceMemory weights_;       // [rows, k_max]
  DeviceMemory counts_;        // [rows]
  DeviceMemory chunk_counts_;  // [E + 1, chunks]
  DeviceMemory arrivals_;  // arrival counters, 0 between launches: one for the grid, then one per
                           // row tile
};

struct RouteLaunch {
  const CudaRouter* router = nullptr;
  RowsView input;                     // in device memory, f32 or bf16 [rows, c]
  const int32_t* sequence = nullptr;  // device memory [rows / rows_per_token]; < 0 marks padding
                                      // tokens, whose rows get no routes; null: there is no padding
  const int32_t* token_ids = nullptr;  // device memory [rows / rows_per_token]; used only with a
                                       // table
  int rows_per_token = 1;
  float* scores = nullptr;  // device memory [rows, E] or null: scores after bias and temperature,
                            // without the bias of an override; not written for padding rows
  int64_t scores_stride = 0;
  const RouteOverride* overrides = nullptr;  // device memory [rows] or null; the biases are in
                                             // device memory, too
  uint8_t* failed = nullptr;  // device memory [rows / rows_per_token] or null; set to 1 for tokens
                              // with a row whose largest score is not finite
  int k_max = 0;  // capacity per row in routes: at least the k of the settings and of every
                  // override
  PlanMemory* plan = nullptr;
  RouteScratch* scratch = nullptr;
  RouteVariant variant = {};  // changes no bit of the results
  // If not null, the launch computes this norm first, whose output is `input`; CanRouteNorm() must
  // allow it.
  const NormLaunch* norm = nullptr;
};

// The most rows whose norm a router's launch computes.
inline constexpr int kMostRoutedNorms = 8;
// Returns whether LaunchRoute() can compute launch.norm, a norm of rows without a plan, on the
// current device.
bool CanRouteNorm(const RouteLaunch& launch);

// Computes scores, selects experts and builds the plan: one launch for few rows (see PlanForm),
// three launches for more, and one more launch if ChangesRow() is true. The plan is valid when the
// stream has run the launches.
RoutingPlan LaunchRoute(const RouteLaunch& launch, cudaStream_t stream);

// Returns the forms in which the current device can route the rows. The first one is used by
// default. Reads neither the launch's `variant` nor its memory.
std::vector<RouteVariant> RouteVariantsThatFit(const RouteLaunch& launch);

struct GivenPlanLaunch {
  int rows = 0;
  int num_experts = 0;
  int k_max = 0;                     // the largest number of routes of any row
  const int32_t* offsets = nullptr;  // device memory [rows + 1]
  const int32_t* experts = nullptr;  // device memory [A], ascending within a row
  const float* weights = nullptr;    // device memory [A]
  PlanMemory* plan = nullptr;
  RouteScratch* scratch = nullptr;
  PlanForm plan_form = PlanForm::kAuto;  // kSameLaunch: one block builds the plan
};

// Builds the plan from given routes.
RoutingPlan LaunchGivenPlan(const GivenPlanLaunch& launch, cudaStream_t stream);

}  // namespace moeserve::cuda

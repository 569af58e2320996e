// Routing on the device: scores, selection, gates and plan with the CPU's bits.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/routing/route_device.h"

namespace moeserve::cuda {

class CudaRouter : public Router {
 public:
  // Widens the tensors, normalises expert vectors and arranges both in the kernels' layout.
  // InvalidArgument where a router is larger than the kernels hold; ResourceExhausted.
  static Result<std::unique_ptr<CudaRouter>> Create(const RouteSettings& settings,
                                                    const RouterTensors& tensors);

  const RouteSettings& settings() const { return tables_.settings; }
  const RouterTables& tables() const { return tables_; }
  int64_t device_bytes() const;

 private:
  CudaRouter() = default;

  RouterTables tables_;
  DeviceMemory weights_;
  DeviceMemory bias_;
  DeviceMemory experts_;
};

// Device arrays of one RoutingPlan. Launches that write one and those that read it are of one
// stream.
class PlanMemory {
 public:
  // Room for `max_rows` rows of up to `k_max` routes each. ResourceExhausted.
  static Result<PlanMemory> Create(int max_rows, int k_max, int num_experts);
  // Grows the arrays where needed. Not between the launch and the end of a step that uses them.
  Status Reserve(int max_rows, int k_max, int num_experts);

  PlanArrays arrays() const;
  int max_rows() const { return max_rows_; }
  int64_t capacity() const { return capacity_; }
  int num_experts() const { return num_experts_; }
  // The view of the plan for readers; every plan of this memory has the same addresses.
  RoutingPlan Plan(int rows, int num_experts, int k_max) const;

 private:
  int max_rows_ = -1;
  int64_t capacity_ = 0;
  int num_experts_ = 0;
  DeviceMemory expert_offsets_, expert_of_assignment_, row_of_assignment_, weight_of_assignment_;
  DeviceMemory row_offsets_, assignments_of_row_, row_nonfinite_;
};

// Results that one launch of routing leaves for the next; shared by all blocks of one stream.
class RouteScratch {
 public:
  // `max_columns`: the largest of the routers' tables().columns. ResourceExhausted.
  static Result<RouteScratch> Create(int max_rows, int k_max, int num_experts, int max_columns);
  Status Reserve(int max_rows, int k_max, int num_experts, int max_columns);

  int max_rows() const { return max_rows_; }
  int64_t max_routes() const { return max_routes_; }
  int64_t max_products() const { return max_products_; }
  int num_experts() const { return num_experts_; }
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
  int num_experts_ = 0;
  DeviceMemory products_;      // [rows, columns]
  DeviceMemory experts_;       // [rows, k_max]
  DeviceMemory weights_;       // [rows, k_max]
  DeviceMemory counts_;        // [rows]
  DeviceMemory chunk_counts_;  // [E + 1, chunks]
  DeviceMemory arrivals_;      // counters, 0 between launches: of the whole grid, of each row tile
};

struct RouteLaunch {
  const CudaRouter* router = nullptr;
  RowsView input;                     // device, f32 or bf16 [rows, c]
  const int32_t* sequence = nullptr;  // device [rows / rows_per_token], < 0: padding, whose rows
                                      // get no routes; null: none is padding
  int rows_per_token = 1;
  float* scores = nullptr;  // device [rows, E] or null, after bias and temperature, an override's
                            // bias excluded; rows of padding are not written
  int64_t scores_stride = 0;
  const RouteOverride* overrides = nullptr;  // device [rows] or null, biases on the device
  uint8_t* failed = nullptr;  // device [rows / rows_per_token] or null: set to 1 for tokens of
                              // which some row has no finite largest score
  int k_max = 0;              // room of a row: at least what the settings and any override select
  PlanMemory* plan = nullptr;
  RouteScratch* scratch = nullptr;
};

// Scores, selects and plans: one launch up to kPlanChunk rows, else three. The plan is valid
// once the stream has run it.
RoutingPlan LaunchRoute(const RouteLaunch& launch, cudaStream_t stream);

struct GivenPlanLaunch {
  int rows = 0;
  int num_experts = 0;
  int k_max = 0;                     // routes of a row at most, and rows * k_max of all
  const int32_t* offsets = nullptr;  // device [rows + 1]
  const int32_t* experts = nullptr;  // device [A], ascending in a row
  const float* weights = nullptr;    // device [A]
  PlanMemory* plan = nullptr;
  RouteScratch* scratch = nullptr;
};

// Builds the plan of given routes.
RoutingPlan LaunchGivenPlan(const GivenPlanLaunch& launch, cudaStream_t stream);

}  // namespace moeserve::cuda

// Divides a routing plan among ranks on the device.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// The arrays of a part of a plan, in device memory.
struct PlanPartArrays {
  int32_t* expert_offsets = nullptr;  // filled before the launch
  int32_t* expert_of_assignment = nullptr;
  int32_t* row_of_assignment = nullptr;
  float* weight_of_assignment = nullptr;
  int32_t* row_offsets = nullptr;  // of `joint`: null, those of the plan
  int32_t* assignments_of_row = nullptr;
};

struct PlanDivision {
  RoutingPlan plan;      // with num_assignments
  PlanPartArrays joint;  // expert_offsets: the first assignment of each expert in its new numbers
  PlanPartArrays local;
  int first = 0;  // the own assignments are [first, first + own) of `joint`
  int own = 0;
};

// Fills the arrays but expert_offsets.
void LaunchDividePlan(const PlanDivision& division, cudaStream_t stream);

}  // namespace moeserve::cuda

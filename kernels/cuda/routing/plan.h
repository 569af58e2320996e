// Builds routing plans on the device, for any number of rows.
#pragma once

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"

namespace moeserve::cuda {

struct PlanBuild {
  RouteTable table;
  int rows = 0;
  int experts = 0;
  bool clear_nonfinite = false;     // whether to set plan.row_nonfinite to zero
  int32_t* chunk_counts = nullptr;  // scratch [E + 1][chunks of kPlanChunk rows]
  int32_t* arrivals = nullptr;      // scratch, 0 before and after the launch
  PlanArrays plan;
};

inline constexpr int64_t PlanChunks(int64_t rows) { return (rows + kPlanChunk - 1) / kPlanChunk; }

// Sorts the routes in `build.table` by expert: one launch for up to kPlanChunk rows, two launches
// for more.
void LaunchPlan(const PlanBuild& build, cudaStream_t stream);

}  // namespace moeserve::cuda

// Plans of any number of rows, on the device.
#pragma once

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"

namespace moeserve::cuda {

struct PlanBuild {
  RouteTable table;
  int rows = 0;
  int experts = 0;
  bool clear_nonfinite = false;     // write zeros to plan.row_nonfinite
  int32_t* chunk_counts = nullptr;  // scratch [E + 1][chunks of kPlanChunk rows]
  int32_t* arrivals = nullptr;      // scratch, 0 before and after
  PlanArrays plan;
};

inline constexpr int64_t PlanChunks(int64_t rows) { return (rows + kPlanChunk - 1) / kPlanChunk; }

// Sorts the table's routes by expert: one launch up to kPlanChunk rows, else two.
void LaunchPlan(const PlanBuild& build, cudaStream_t stream);

}  // namespace moeserve::cuda

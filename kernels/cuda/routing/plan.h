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

// Return the shared memory of a block that builds the whole plan of up to kOnePlanRows rows, and of
// a block that processes a chunk of kPlanChunk rows.
int64_t OnePlanBytes(int experts, int rows);
int64_t ChunkPlanBytes(int experts);

// Sorts the routes in `build.table` by expert: by one block, which takes up to kOnePlanRows rows,
// or in two launches with a block per chunk. The results are equal.
void LaunchPlan(const PlanBuild& build, bool one_launch, cudaStream_t stream);

}  // namespace moeserve::cuda

#include <algorithm>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/ranks/plan_division.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// More blocks would not be faster: the arrays of a plan are small.
constexpr int64_t kMostBlocks = 528;

__device__ void StoreAssignment(const PlanPartArrays& part, int number, int expert, int row,
                                float weight) {
  part.expert_of_assignment[number] = expert;
  part.row_of_assignment[number] = row;
  part.weight_of_assignment[number] = weight;
}

// Numbers the assignments anew. A thread takes the place of an assignment among those of the rows,
// so that the numbers of a row stay in the order of experts.
__global__ void __launch_bounds__(kThreads) NumberAssignmentsKernel(PlanDivision d) {
  GridDependencyPass();
  const RoutingPlan& plan = d.plan;
  const int stride = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       i < plan.num_assignments; i += stride) {
    const int a = plan.assignments_of_row[i];
    const int expert = plan.expert_of_assignment[a];
    const int row = plan.row_of_assignment[a];
    const float weight = plan.weight_of_assignment[a];
    const int number = d.joint.expert_offsets[expert] + a - plan.expert_offsets[expert];
    d.joint.assignments_of_row[i] = number;
    StoreAssignment(d.joint, number, expert, row, weight);
    const int own = number - d.first;
    if (own >= 0 && own < d.own) StoreAssignment(d.local, own, expert, row, weight);
  }
}

// Returns the sum over the block's threads before this one; *total becomes that over all. `totals`
// is shared memory that no thread reads at the call.
__device__ int SumBefore(int value, int* totals, int* total) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  int inclusive = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(kFullMask, inclusive, distance);
    if (lane >= distance) inclusive += below;
  }
  if (lane == 31) totals[warp] = inclusive;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += totals[w];
    all += totals[w];
  }
  *total = all;
  return before + inclusive - value;
}

// Lists the own assignments of rows: a thread those of a row, a block those of kThreads rows. Each
// block counts those of all rows before it, which takes less time than a second launch.
__global__ void __launch_bounds__(kThreads) OwnRowsKernel(PlanDivision d) {
  GridDependencyPass();
  int* const totals = DynamicShared<int>();  // [2][kWarps]
  const int32_t* const numbers = d.joint.assignments_of_row;
  const int32_t* const row_offsets = d.plan.row_offsets;
  const int thread = static_cast<int>(threadIdx.x);
  const auto is_own = [&](int i) {
    const int own = numbers[i] - d.first;
    return own >= 0 && own < d.own;
  };
  const int first_row = static_cast<int>(blockIdx.x) * kThreads;
  int earlier = 0;
  for (int i = thread; i < row_offsets[first_row]; i += kThreads) earlier += is_own(i);
  int base;
  SumBefore(earlier, totals, &base);

  const int row = first_row + thread;
  const int begin = row < d.plan.rows ? row_offsets[row] : 0;
  const int end = row < d.plan.rows ? row_offsets[row + 1] : 0;
  int count = 0;
  for (int i = begin; i < end; ++i) count += is_own(i);
  int of_block;
  int to = base + SumBefore(count, totals + kWarps, &of_block);
  if (row < d.plan.rows) d.local.row_offsets[row] = to;
  if (row == d.plan.rows || (row + 1 == d.plan.rows && thread + 1 == kThreads)) {
    d.local.row_offsets[d.plan.rows] = d.own;
  }
  for (int i = begin; i < end; ++i) {
    if (is_own(i)) d.local.assignments_of_row[to++] = numbers[i] - d.first;
  }
}

}  // namespace

void LaunchDividePlan(const PlanDivision& division, cudaStream_t stream) {
  const int64_t blocks = (int64_t{division.plan.num_assignments} + kThreads - 1) / kThreads;
  Launch(NumberAssignmentsKernel,
         {.grid = dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks))),
          .block = dim3(kThreads),
          .stream = stream,
          .overlaps_predecessor = true},
         division);
  const int row_blocks = std::max(1, (division.plan.rows + kThreads - 1) / kThreads);
  Launch(OwnRowsKernel,
         {.grid = dim3(static_cast<unsigned>(row_blocks)),
          .block = dim3(kThreads),
          .shared_bytes = 2 * kWarps * sizeof(int),
          .stream = stream,
          .overlaps_predecessor = true},
         division);
}

}  // namespace moeserve::cuda

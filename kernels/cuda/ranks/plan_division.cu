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

// A thread finds the first assignment of an expert in rows that a rank adds; the assignments of an
// expert are sorted by row.
__global__ void __launch_bounds__(kThreads) FindAddersKernel(RoutingPlan plan, PlanAdders adders) {
  GridDependencyPass();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= plan.num_experts * adders.ranks) return;
  const int expert = i / adders.ranks;
  const int row = adders.row_begin[i % adders.ranks];
  int begin = plan.expert_offsets[expert], end = plan.expert_offsets[expert + 1];
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (plan.row_of_assignment[middle] < row) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  adders.first_added[i] = begin;
}

// Numbers the assignments anew. A thread takes the place of an assignment among those of the rows,
// so that the numbers of a row stay in the order of experts.
__global__ void __launch_bounds__(kThreads) NumberAssignmentsKernel(PlanDivision d) {
  GridDependencyPass();
  const RoutingPlan& plan = d.plan;
  const PlanAdders& adders = d.adders;
  const int first_of_rows = plan.row_offsets[d.begin_row];
  const int stride = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       i < plan.num_assignments; i += stride) {
    const int a = plan.assignments_of_row[i];
    const int expert = plan.expert_of_assignment[a];
    const int row = plan.row_of_assignment[a];
    const float weight = plan.weight_of_assignment[a];
    const int first = plan.expert_offsets[expert];
    if (row >= d.begin_row && row < d.end_row) {
      const int first_here =
          adders.ranks > 0 ? adders.first_added[expert * adders.ranks + d.rank] : first;
      const int number = d.joint.expert_offsets[expert] + a - first_here;
      d.joint.assignments_of_row[i - first_of_rows] = number;
      StoreAssignment(d.joint, number, expert, row - d.begin_row, weight);
    }
    int own = -1;
    // An expert with assignments is an own one if it has some in `local`.
    if (expert < d.places && d.local.expert_offsets[expert] < d.local.expert_offsets[expert + 1]) {
      own = d.local.expert_offsets[expert] + a - first;
      StoreAssignment(d.local, own, expert, row, weight);
      if (adders.ranks > 0) {
        int adder = 0;
        while (row >= adders.row_begin[adder + 1]) ++adder;
        const int at = expert * adders.ranks + adder;
        adders.by_adder[adders.place[at] + a - adders.first_added[at]] = own;
      }
    }
    d.local_numbers[i] = own;
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
  const int32_t* const row_offsets = d.plan.row_offsets;
  const int thread = static_cast<int>(threadIdx.x);
  const int first_row = static_cast<int>(blockIdx.x) * kThreads;
  int earlier = 0;
  for (int i = thread; i < row_offsets[first_row]; i += kThreads) {
    earlier += d.local_numbers[i] >= 0;
  }
  int base;
  SumBefore(earlier, totals, &base);

  const int row = first_row + thread;
  const int begin = row < d.plan.rows ? row_offsets[row] : 0;
  const int end = row < d.plan.rows ? row_offsets[row + 1] : 0;
  int count = 0;
  for (int i = begin; i < end; ++i) count += d.local_numbers[i] >= 0;
  int of_block;
  int to = base + SumBefore(count, totals + kWarps, &of_block);
  if (row < d.plan.rows) {
    d.local.row_offsets[row] = to;
    if (row + 1 == d.plan.rows) d.local.row_offsets[row + 1] = to + count;
  } else if (d.plan.rows == 0 && thread == 0) {
    d.local.row_offsets[0] = 0;
  }
  for (int i = begin; i < end; ++i) {
    if (d.local_numbers[i] >= 0) d.local.assignments_of_row[to++] = d.local_numbers[i];
  }
  if (d.joint.row_offsets == nullptr) return;
  const int first_of_rows = row_offsets[d.begin_row];
  if (row >= d.begin_row && row < d.end_row) {
    d.joint.row_offsets[row - d.begin_row] = begin - first_of_rows;
  }
  if (thread == 0 && blockIdx.x == 0) {
    d.joint.row_offsets[d.end_row - d.begin_row] = row_offsets[d.end_row] - first_of_rows;
  }
}

// A block copies rows, one after the other, by pieces of the type.
template <typename Piece>
__global__ void __launch_bounds__(kThreads) PackResultsKernel(PackedResults r) {
  GridDependencyPass();
  const auto pieces = static_cast<int>(r.row_bytes / static_cast<int64_t>(sizeof(Piece)));
  for (int64_t i = blockIdx.x; i < r.rows; i += gridDim.x) {
    char* const to = i < r.kept       ? r.packed + i * r.row_bytes
                     : i < r.kept_end ? r.results + (r.first + i - r.kept) * r.row_bytes
                                      : r.packed + (i - (r.kept_end - r.kept)) * r.row_bytes;
    const char* const from = r.own + r.by_adder[i] * r.row_bytes;
    for (int p = static_cast<int>(threadIdx.x); p < pieces; p += kThreads) {
      reinterpret_cast<Piece*>(to)[p] = reinterpret_cast<const Piece*>(from)[p];
    }
  }
}

}  // namespace

void LaunchFindAdders(const RoutingPlan& plan, const PlanAdders& adders, cudaStream_t stream) {
  const int threads = plan.num_experts * adders.ranks;
  Launch(FindAddersKernel,
         {.grid = dim3(static_cast<unsigned>(std::max(1, (threads + kThreads - 1) / kThreads))),
          .block = dim3(kThreads),
          .stream = stream,
          .overlaps_predecessor = true},
         plan, adders);
}

void LaunchPackResults(const PackedResults& rows, cudaStream_t stream) {
  if (rows.rows == 0) return;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(std::min(rows.rows, kMostBlocks))),
                          .block = dim3(kThreads),
                          .stream = stream,
                          .overlaps_predecessor = true};
  if (rows.row_bytes % static_cast<int64_t>(sizeof(uint4)) == 0) {
    Launch(PackResultsKernel<uint4>, shape, rows);
  } else {
    Launch(PackResultsKernel<uint16_t>, shape, rows);
  }
}

void LaunchDividePlan(const PlanDivision& division, cudaStream_t stream) {
  const int64_t blocks = (int64_t{division.plan.num_assignments} + kThreads - 1) / kThreads;
  Launch(NumberAssignmentsKernel,
         {.grid = dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMostBlocks))),
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

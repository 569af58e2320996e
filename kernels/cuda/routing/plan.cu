#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/routing/plan.h"
#include "kernels/cuda/routing/route_plan.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 8;  // see ForEachRoute()

__device__ void ClearNonfinite(const PlanBuild& b, int first_row, int rows) {
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += kThreads) {
    b.plan.row_nonfinite[first_row + r] = 0;
  }
}

__global__ void __launch_bounds__(kThreads) OnePlanKernel(PlanBuild b) {
  GridDependencyPass();
  if (b.clear_nonfinite) ClearNonfinite(b, 0, b.rows);
  const PlanScratch scratch = CarvePlan(DynamicShared<char>(), b.experts, b.rows, true);
  BuildOnePlan(b.table, b.experts, b.rows, scratch, b.plan);
}

// Counts the routes to each expert in each chunk of kPlanChunk rows. The last block to arrive
// replaces each of these counts by the sum of the expert's counts in the preceding chunks, and
// writes the expert offsets.
__global__ void __launch_bounds__(kThreads) ChunkCountKernel(PlanBuild b) {
  GridDependencyPass();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31, warp = thread >> 5;
  const int chunk = static_cast<int>(blockIdx.x), chunks = static_cast<int>(gridDim.x);
  const int first_row = chunk * kPlanChunk;
  const int rows = min(kPlanChunk, b.rows - first_row);
  const PlanScratch s = CarvePlan(DynamicShared<char>(), b.experts, rows, false);
  if (b.clear_nonfinite) ClearNonfinite(b, first_row, rows);
  MarkRoutes<kBatch>(b.table, b.experts, first_row, rows, s);
  BlockScan(s.counts + b.experts, rows, s.partial);
  for (int e = thread; e < b.experts; e += kThreads) {
    b.chunk_counts[int64_t{e} * chunks + chunk] = s.counts[e];
  }
  if (thread == 0) b.chunk_counts[int64_t{b.experts} * chunks + chunk] = s.counts[b.experts + rows];

  if (!LastToArrive(b.arrivals, chunks, s.partial)) return;
  for (int e = warp; e <= b.experts; e += kThreads / 32) {
    int32_t* counts = b.chunk_counts + int64_t{e} * chunks;
    int32_t carry = 0;
    for (int base = 0; base < chunks; base += 32) {
      const int c = base + lane;
      const int32_t own = c < chunks ? __ldcg(counts + c) : 0;
      const int32_t inclusive = WarpInclusiveScan(own, lane);
      if (c < chunks) counts[c] = carry + inclusive - own;
      carry += __shfl_sync(kFullMask, inclusive, 31);
    }
    if (lane == 0 && e < b.experts) s.counts[e] = carry;
  }
  __syncthreads();
  BlockScan(s.counts, b.experts, s.partial);
  for (int e = thread; e <= b.experts; e += kThreads) b.plan.expert_offsets[e] = s.counts[e];
}

__global__ void __launch_bounds__(kThreads) ChunkWriteKernel(PlanBuild b) {
  GridDependencyPass();
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = static_cast<int>(blockIdx.x), chunks = static_cast<int>(gridDim.x);
  const int first_row = chunk * kPlanChunk;
  const int rows = min(kPlanChunk, b.rows - first_row);
  const PlanScratch s = CarvePlan(DynamicShared<char>(), b.experts, rows, false);
  MarkRoutes<kBatch>(b.table, b.experts, first_row, rows, s);
  int32_t* row_begin = s.counts + b.experts;
  BlockScan(row_begin, rows, s.partial);
  for (int e = thread; e < b.experts; e += kThreads) {
    s.counts[e] = b.plan.expert_offsets[e] + b.chunk_counts[int64_t{e} * chunks + chunk];
  }
  __syncthreads();
  const int32_t row_base = b.chunk_counts[int64_t{b.experts} * chunks + chunk];
  for (int r = thread; r < rows; r += kThreads) {
    b.plan.row_offsets[first_row + r] = row_base + row_begin[r];
  }
  if (thread == 0 && chunk == chunks - 1) b.plan.row_offsets[b.rows] = row_base + row_begin[rows];
  WriteRoutes<kBatch, false>(b.table, b.experts, first_row, rows, s, s.counts, row_begin, row_base,
                             true, b.plan);
}

}  // namespace

int64_t OnePlanBytes(int experts, int rows) { return PlanBytes(experts, rows, true); }

int64_t ChunkPlanBytes(int experts) { return PlanBytes(experts, kPlanChunk, false); }

void LaunchPlan(const PlanBuild& build, bool one_launch, cudaStream_t stream) {
  if (one_launch) {
    Launch(OnePlanKernel,
           {.grid = 1,
            .block = kThreads,
            .shared_bytes = static_cast<size_t>(OnePlanBytes(build.experts, build.rows)),
            .stream = stream,
            .overlaps_predecessor = true},
           build);
    return;
  }
  const LaunchShape shape{.grid = static_cast<unsigned>(PlanChunks(build.rows)),
                          .block = kThreads,
                          .shared_bytes = static_cast<size_t>(ChunkPlanBytes(build.experts)),
                          .stream = stream,
                          .overlaps_predecessor = true};
  Launch(ChunkCountKernel, shape, build);
  Launch(ChunkWriteKernel, shape, build);
}

}  // namespace moeserve::cuda

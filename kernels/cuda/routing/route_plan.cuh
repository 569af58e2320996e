// Builds a routing plan (compressed sparse rows in both directions) from a table of routes. One
// block processes at most kPlanChunk rows. There is one bit per (expert, row). The index of an
// assignment among those of its expert is the number of set bits for lower rows, so it does not
// depend on the order in which threads arrive.
#pragma once

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

// The shared memory of a block that builds a plan.
struct PlanScratch {
  uint32_t* bits;    // [E][kPlanWords] one bit per (expert, row)
  int32_t* counts;   // [E + kPlanChunk + 1] counts of the experts, then of the rows
  int32_t* partial;  // [33] scratch of BlockScan()
};

inline constexpr int64_t PlanBytes(int experts) {
  return int64_t{4} * (int64_t{experts} * (kPlanWords + 1) + kPlanChunk + 1 + 33);
}

__device__ inline PlanScratch CarvePlan(char* memory, int experts) {
  PlanScratch s;
  s.bits = reinterpret_cast<uint32_t*>(memory);
  s.counts = reinterpret_cast<int32_t*>(s.bits + int64_t{experts} * kPlanWords);
  s.partial = s.counts + experts + kPlanChunk + 1;
  return s;
}

__device__ inline int64_t FirstRoute(const RouteTable& table, int row) {
  return table.offsets != nullptr ? table.offsets[row] : int64_t{row} * table.k_max;
}

__device__ inline int32_t CountOf(const RouteTable& table, int row) {
  if (table.offsets != nullptr) return table.offsets[row + 1] - table.offsets[row];
  return __ldcg(table.counts + row);
}

// Returns the number of adjacent threads that share a row.
__device__ inline int RouteGroup(int k_max) { return k_max > 4 ? 8 : k_max > 2 ? 4 : k_max; }

// Calls use(row of the chunk, index in the row, expert, weight) for every route; count(row) must
// return the number of routes of a row. Adjacent threads process adjacent routes of a row, and the
// loads for several rows are in flight together. Without kWeights, the weight passed is 0.
template <bool kWeights, typename Count, typename Use>
__device__ inline void ForEachRoute(const RouteTable& table, int first_row, int rows,
                                    const Count& count, const Use& use) {
  constexpr int kBatch = 8;
  const int group = RouteGroup(table.k_max);
  const int within = static_cast<int>(threadIdx.x) & (group - 1);
  const int groups = static_cast<int>(blockDim.x) / group;
  for (int first = static_cast<int>(threadIdx.x) / group; first < rows; first += groups * kBatch) {
    bool any = true;
    for (int i = within; any; i += group) {
      int32_t experts[kBatch];
      float weights[kBatch];
      any = false;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int r = first + j * groups;
        const bool there = r < rows && i < count(r);
        const int64_t at = there ? FirstRoute(table, first_row + r) + i : 0;
        experts[j] = there ? __ldcg(table.experts + at) : -1;
        weights[j] = kWeights && there ? __ldcg(table.weights + at) : 0.0f;
        any = any || there;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (experts[j] >= 0) use(first + j * groups, i, experts[j], weights[j]);
      }
    }
  }
}

// Computes exclusive prefix sums of v[0 .. n) in place, by all threads of the block; v[n] becomes
// the total.
__device__ inline void BlockScan(int32_t* v, int n, int32_t* partial) {
  constexpr int kEach = 4;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = thread & 31, warp = thread >> 5;
  int32_t carry = 0;
  for (int base = 0; base < n; base += threads * kEach) {
    const int first = base + thread * kEach;
    int32_t own[kEach], sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      own[j] = first + j < n ? v[first + j] : 0;
      sum += own[j];
    }
    const int32_t inclusive = WarpInclusiveScan(sum, lane);
    if (lane == 31) partial[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
      const int32_t total = lane < threads / 32 ? partial[lane] : 0;
      const int32_t scanned = WarpInclusiveScan(total, lane);
      partial[lane] = scanned - total;
      if (lane == 31) partial[32] = scanned;
    }
    __syncthreads();
    int32_t before = carry + partial[warp] + inclusive - sum;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (first + j < n) v[first + j] = before;
      before += own[j];
    }
    carry += partial[32];
    __syncthreads();
  }
  if (thread == 0) v[n] = carry;
  __syncthreads();
}

// Sets the bits of the chunk's routes, and counts the routes of each expert and of each row.
__device__ inline void MarkRoutes(const RouteTable& table, int experts, int first_row, int rows,
                                  const PlanScratch& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < experts * kPlanWords; i += threads) s.bits[i] = 0;
  for (int r = thread; r < rows; r += threads) {
    s.counts[experts + r] = CountOf(table, first_row + r);
  }
  __syncthreads();
  const int32_t* row_counts = s.counts + experts;
  ForEachRoute<false>(
      table, first_row, rows, [&](int r) { return row_counts[r]; },
      [&](int r, int, int32_t e, float) {
        atomicOr(&s.bits[e * kPlanWords + r / 32], 1u << (r % 32));
      });
  __syncthreads();
  for (int e = thread; e < experts; e += threads) {
    int32_t count = 0;
#pragma unroll
    for (int w = 0; w < kPlanWords; ++w) count += __popc(s.bits[e * kPlanWords + w]);
    s.counts[e] = count;
  }
  __syncthreads();
}

// Writes the assignments of the chunk; MarkRoutes() must have run before. expert_begin [E] is the
// index of each expert's first assignment from this chunk. row_base + row_begin[r], for r in [0,
// rows], is the index of the first element of row r in assignments_of_row.
__device__ inline void WriteRoutes(const RouteTable& table, int first_row, int rows,
                                   const uint32_t* bits, const int32_t* expert_begin,
                                   const int32_t* row_begin, int32_t row_base,
                                   const PlanArrays& plan) {
  ForEachRoute<true>(
      table, first_row, rows, [&](int r) { return row_begin[r + 1] - row_begin[r]; },
      [&](int r, int i, int32_t e, float weight) {
        const uint32_t* words = bits + int64_t{e} * kPlanWords;
        int32_t before = __popc(words[r / 32] & ((1u << (r % 32)) - 1));
        for (int w = 0; w < r / 32; ++w) before += __popc(words[w]);
        const int32_t a = expert_begin[e] + before;
        plan.expert_of_assignment[a] = e;
        plan.row_of_assignment[a] = first_row + r;
        plan.weight_of_assignment[a] = weight;
        plan.assignments_of_row[row_base + row_begin[r] + i] = a;
      });
}

// Builds the whole plan for at most kPlanChunk rows.
__device__ inline void BuildSmallPlan(const RouteTable& table, int experts, int rows,
                                      const PlanScratch& s, const PlanArrays& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  MarkRoutes(table, experts, 0, rows, s);
  // A single scan covers the counts of experts and rows. The prefix sums of the rows begin at the
  // total of the experts, which is subtracted from them.
  BlockScan(s.counts, experts + rows, s.partial);
  const int32_t total = s.counts[experts];
  for (int e = thread; e <= experts; e += threads) plan.expert_offsets[e] = s.counts[e];
  for (int r = thread; r <= rows; r += threads) plan.row_offsets[r] = s.counts[experts + r] - total;
  WriteRoutes(table, 0, rows, s.bits, s.counts, s.counts + experts, -total, plan);
}

}  // namespace moeserve::cuda

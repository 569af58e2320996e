// Builds a routing plan (compressed sparse rows in both directions) from a table of routes. There
// is one bit per (expert, row) of a block. The index of an assignment among those of its expert is
// the number of set bits for lower rows, so it does not depend on the order in which threads
// arrive.
#pragma once

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

MOESERVE_HOST_DEVICE constexpr int PlanWords(int rows) { return (rows + 31) / 32; }

// The shared memory of a block that builds a plan for at most kOnePlanRows rows.
struct PlanScratch {
  int words;         // per expert: PlanWords() of the rows
  uint32_t* bits;    // [words][E]; bit r % 32 of word r / 32 belongs to row r
  int32_t* counts;   // [E + rows + 1] counts of the experts, then of the rows
  int32_t* partial;  // [33] scratch of BlockScan()
  uint16_t* before;  // [words][E] number of bits in the expert's lower words, or null
};

// `sums`: whether the memory includes PlanScratch::before.
inline constexpr int64_t PlanBytes(int experts, int rows, bool sums) {
  const int64_t bits = int64_t{experts} * PlanWords(rows);
  return 4 * (bits + experts + rows + 1 + 33) + (sums ? (2 * bits + 3) / 4 * 4 : 0);
}

__device__ inline PlanScratch CarvePlan(char* memory, int experts, int rows, bool sums) {
  PlanScratch s;
  s.words = PlanWords(rows);
  s.bits = reinterpret_cast<uint32_t*>(memory);
  s.counts = reinterpret_cast<int32_t*>(s.bits + experts * s.words);
  s.partial = s.counts + experts + rows + 1;
  s.before = sums ? reinterpret_cast<uint16_t*>(s.partial + 33) : nullptr;
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
// loads for kBatch rows are in flight together. Without kWeights, the weight passed is 0.
template <int kBatch, bool kWeights, typename Count, typename Use>
__device__ inline void ForEachRoute(const RouteTable& table, int first_row, int rows,
                                    const Count& count, const Use& use) {
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

// Computes the exclusive prefix sums of value(i) for i in [0, n), by all threads of the block, and
// stores them in v, which `value` may read; v[n] becomes the total.
template <typename Value>
__device__ inline void BlockScan(int32_t* v, int n, int32_t* partial, const Value& value) {
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
      own[j] = first + j < n ? value(first + j) : 0;
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
    if (base + threads * kEach < n) __syncthreads();  // before `partial` is overwritten
  }
  if (thread == 0) v[n] = carry;
  __syncthreads();
}

// As above, in place.
__device__ inline void BlockScan(int32_t* v, int n, int32_t* partial) {
  BlockScan(v, n, partial, [&](int i) { return v[i]; });
}

// Counts the routes of each expert from the bits, and writes `before`.
__device__ inline void CountBits(int experts, const PlanScratch& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (s.before != nullptr && s.words > 4 && experts < threads / 4) {
    // One word per lane occupies more threads than one expert per thread.
    static_assert(PlanWords(kOnePlanRows) <= 32);
    const int lane = thread & 31;
    for (int e = thread >> 5; e < experts; e += threads / 32) {
      const int32_t own = lane < s.words ? __popc(s.bits[lane * experts + e]) : 0;
      const int32_t inclusive = WarpInclusiveScan(own, lane);
      if (lane < s.words) {
        s.before[lane * experts + e] = static_cast<uint16_t>(inclusive - own);
      }
      if (lane == 31) s.counts[e] = inclusive;
    }
    return;
  }
  for (int e = thread; e < experts; e += threads) {
    int32_t count = 0;
#pragma unroll 8
    for (int w = 0; w < s.words; ++w) {
      if (s.before != nullptr) s.before[w * experts + e] = static_cast<uint16_t>(count);
      count += __popc(s.bits[w * experts + e]);
    }
    s.counts[e] = count;
  }
}

// Sets the bits of the block's routes, and counts the routes of each expert and of each row.
template <int kBatch>
__device__ inline void MarkRoutes(const RouteTable& table, int experts, int first_row, int rows,
                                  const PlanScratch& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < experts * s.words; i += threads) s.bits[i] = 0;
  for (int r = thread; r < rows; r += threads) {
    s.counts[experts + r] = CountOf(table, first_row + r);
  }
  __syncthreads();
  const int32_t* row_counts = s.counts + experts;
  ForEachRoute<kBatch, false>(
      table, first_row, rows, [&](int r) { return row_counts[r]; },
      [&](int r, int, int32_t e, float) {
        atomicOr(&s.bits[r / 32 * experts + e], 1u << (r % 32));
      });
  __syncthreads();
  CountBits(experts, s);
  __syncthreads();
}

// Writes the assignments of the block's rows; MarkRoutes() must have run before. expert_begin [E]
// is the index of each expert's first assignment from these rows. row_base + row_begin[r], for r in
// [0, rows], is the index of the first element of row r in assignments_of_row. Without
// `experts_too`, expert_of_assignment is left to WriteExperts().
template <int kBatch, bool kSums>
__device__ inline void WriteRoutes(const RouteTable& table, int experts, int first_row, int rows,
                                   const PlanScratch& s, const int32_t* expert_begin,
                                   const int32_t* row_begin, int32_t row_base, bool experts_too,
                                   const PlanArrays& plan) {
  ForEachRoute<kBatch, true>(
      table, first_row, rows, [&](int r) { return row_begin[r + 1] - row_begin[r]; },
      [&](int r, int i, int32_t e, float weight) {
        const int word = r / 32, at = word * experts + e;
        int32_t a = expert_begin[e] + __popc(s.bits[at] & ((1u << (r % 32)) - 1));
        if constexpr (kSums) {
          a += s.before[at];
        } else {
          for (int w = 0; w < word; ++w) a += __popc(s.bits[w * experts + e]);
        }
        if (experts_too) plan.expert_of_assignment[a] = e;
        plan.row_of_assignment[a] = first_row + r;
        plan.weight_of_assignment[a] = weight;
        plan.assignments_of_row[row_base + row_begin[r] + i] = a;
      });
}

// Writes expert_of_assignment in its own order, a warp per expert.
__device__ inline void WriteExperts(int experts, const int32_t* expert_offsets,
                                    const PlanArrays& plan) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int e = static_cast<int>(threadIdx.x) >> 5; e < experts;
       e += static_cast<int>(blockDim.x) / 32) {
    const int32_t end = expert_offsets[e + 1];
    for (int32_t a = expert_offsets[e] + lane; a < end; a += 32) plan.expert_of_assignment[a] = e;
  }
}

// Writes the offsets of a plan whose scratch memory has the prefix sums of the counts of experts
// and rows. The prefix sums of the rows begin at the returned total of the experts.
__device__ inline int32_t WriteOffsets(int experts, int rows, const int32_t* sums,
                                       const PlanArrays& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int32_t total = sums[experts];
  for (int i = thread; i <= experts + rows; i += threads) {
    const int32_t sum = sums[i];
    if (i <= experts) plan.expert_offsets[i] = sum;
    if (i >= experts) plan.row_offsets[i - experts] = sum - total;
  }
  return total;
}

// Builds the whole plan for at most kOnePlanRows rows. The scratch memory includes `before`.
__device__ inline void BuildOnePlan(const RouteTable& table, int experts, int rows,
                                    const PlanScratch& s, const PlanArrays& plan) {
  // Enough for 256 rows of 4 routes, without much code in kernels that do other work, too.
  constexpr int kBatch = 4;
  MarkRoutes<kBatch>(table, experts, 0, rows, s);
  // A single scan covers the counts of experts and rows.
  BlockScan(s.counts, experts + rows, s.partial);
  const int32_t total = WriteOffsets(experts, rows, s.counts, plan);
  const bool few = rows <= kPlanChunk;
  WriteRoutes<kBatch, true>(table, experts, 0, rows, s, s.counts, s.counts + experts, -total, few,
                            plan);
  if (!few) WriteExperts(experts, s.counts, plan);
}

// Builds the whole plan from a table in shared memory, of at most 32 rows and as many routes as the
// block has threads: each thread processes the route that has its index in the table.
__device__ inline void BuildFewRoutesPlan(const RouteTable& table, int experts, int rows,
                                          const PlanScratch& s, const PlanArrays& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int e = thread; e < experts; e += threads) s.bits[e] = 0;
  const int r = thread / table.k_max, i = thread % table.k_max;
  const bool there = r < rows && i < table.counts[r];
  const int32_t expert = there ? table.experts[thread] : 0;
  __syncthreads();
  if (there) atomicOr(&s.bits[expert], 1u << r);
  __syncthreads();
  BlockScan(s.counts, experts + rows, s.partial,
            [&](int at) { return at < experts ? __popc(s.bits[at]) : table.counts[at - experts]; });
  const int32_t total = WriteOffsets(experts, rows, s.counts, plan);
  if (!there) return;
  const int32_t a = s.counts[expert] + __popc(s.bits[expert] & ((1u << r) - 1));
  plan.expert_of_assignment[a] = expert;
  plan.row_of_assignment[a] = r;
  plan.weight_of_assignment[a] = table.weights[thread];
  plan.assignments_of_row[s.counts[experts + r] - total + i] = a;
}

}  // namespace moeserve::cuda

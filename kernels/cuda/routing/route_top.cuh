// One warp selects the k experts of one row with the largest scores. This is the part of
// route_select.cuh that most routers need, for few experts: scores are held in registers, and lane
// r of the warp holds the expert of rank r.
#pragma once

#include "kernels/base/routing.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_cosine.cuh"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_variant.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

struct TopRowArgs {
  const RouterTables* router;
  RowProducts products;  // [columns]
  const float* table;    // cosine router only: the expert vectors [dim][E] in shared memory
  float* scratch;        // kSelectTopBytes of shared memory
  float* scores;         // device memory [E] or null
  int32_t* experts;      // [k] in shared or global memory, like weights and count
  float* weights;        // [k]
  int32_t* count;
  uint8_t* nonfinite;
};

// GateValue() for the gates that IsTopRouter() allows.
__device__ __forceinline__ float TopGateValue(GateKind gate, float score, float maximum) {
  const bool sigmoid = gate == GateKind::kSigmoid;
  const float e = ContractExp(sigmoid ? -score : score - maximum);
  return sigmoid ? 1.0f / (1.0f + e) : e;
}

// Vectors of kMostTopDim elements have partial sums for this many levels of the tree.
inline constexpr int kTopLevels = 3;
static_assert(kRoutingGroup << kTopLevels == kMostTopDim);

// Computes the scores of experts lane, lane + 32, ...; those of other experts are unspecified.
template <bool kCosine, int kSlots>
__device__ __forceinline__ void TopScores(const TopRowArgs& a, int lane, float (&score)[kSlots]) {
  const RouteSettings& s = a.router->settings;
  if constexpr (kCosine) {
    ReadProjection(s, a.products, a.scratch, lane);
    int at[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) at[j] = lane + 32 * j;
    ColumnDots<true, kTopLevels>(a.table, s.num_experts, at, a.scratch, s.dim, score);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      score[j] = WithTemperature(s.temperature, score[j], a.router->temperature);
    }
    __syncwarp();  // the scratch memory is used for other values next
  } else {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      score[j] = lane + 32 * j < s.num_experts ? a.products[lane + 32 * j] : 0.0f;
    }
  }
}

struct LaneRank {
  uint32_t order;   // OrderOfScore() of the expert of the lane's rank
  uint32_t expert;  // unspecified in lanes from k on
};

// Finds ranks 0 to k - 1; each rank is the maximum of the remaining experts.
template <int kSlots>
__device__ __forceinline__ LaneRank FindTop(const uint32_t (&orders)[kSlots], int experts, int k,
                                            int lane) {
  constexpr uint32_t kNone = 0xffffffffu;
  uint32_t best = 0, best_expert = kNone;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const bool better = lane + 32 * j < experts && (best_expert == kNone || orders[j] > best);
    best = better ? orders[j] : best;
    best_expert = better ? static_cast<uint32_t>(lane + 32 * j) : best_expert;
  }
  LaneRank mine{0, kNone};
#pragma unroll 1
  for (int rank = 0; rank < k; ++rank) {
    const uint32_t top = __reduce_max_sync(kFullMask, best);
    const uint32_t expert = __reduce_min_sync(kFullMask, best == top ? best_expert : kNone);
    if (lane == rank) mine = {top, expert};
    if (best_expert != expert) continue;
    best = 0;
    best_expert = kNone;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const auto e = static_cast<uint32_t>(lane + 32 * j);
      const bool left = orders[j] < top || (orders[j] == top && e > expert);
      const bool better =
          left && lane + 32 * j < experts && (best_expert == kNone || orders[j] > best);
      best = better ? orders[j] : best;
      best_expert = better ? e : best_expert;
    }
  }
  return mine;
}

// Returns, in every lane, the sum of the gate values of all experts.
template <int kSlots>
__device__ __forceinline__ float TopTotal(const TopRowArgs& a, const uint32_t (&orders)[kSlots],
                                          float maximum, int lane) {
  const RouteSettings& s = a.router->settings;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int e = lane + 32 * j;
    if (e >= s.num_experts) continue;
    a.scratch[e] = TopGateValue(s.gate, ScoreOfOrder(orders[j]), maximum);
  }
  __syncwarp();
  const float total = WarpSum(a.scratch, s.num_experts, lane);
  __syncwarp();
  return total;
}

template <bool kCosine, int kSlots>
__device__ __forceinline__ bool SelectTopIn(const TopRowArgs& a, int lane) {
  const RouteSettings& s = a.router->settings;
  const int experts = s.num_experts;
  const RowSelection row = SelectionOf(s);
  float score[kSlots];
  TopScores<kCosine>(a, lane, score);
  uint32_t orders[kSlots];
  bool nan = false;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int e = lane + 32 * j;
    orders[j] = OrderOfScore(score[j]);
    if (e >= experts) continue;
    if (a.scores != nullptr) a.scores[e] = score[j];
    nan = nan || orders[j] == 0;
  }
  nan = __any_sync(kFullMask, nan);

  const LaneRank mine = FindTop(orders, experts, row.k, lane);
  const float maximum = ScoreOfOrder(__shfl_sync(kFullMask, mine.order, 0));
  const bool finite = maximum - maximum == 0.0f;
  float total = 1.0f;
  if (finite && NeedsTotal(s, row)) total = TopTotal(a, orders, maximum, lane);
  const float value =
      finite && lane < row.k ? TopGateValue(s.gate, ScoreOfOrder(mine.order), maximum) : 0.0f;

  // The sum is in rank order; the position is that of the lane's expert in ascending order.
  float sum = 0.0f;
  int position = 0;
#pragma unroll 4
  for (int rank = 0; rank < row.k; ++rank) {
    sum = sum + __shfl_sync(kFullMask, value, rank);
    position += __shfl_sync(kFullMask, mine.expert, rank) < mine.expert;
  }
  if (lane < row.k) {
    float weight = FinalGate(value, DivisorValue(DivisorOf(s), total, sum), s.scale);
    if (finite && a.router->expert_scale != nullptr) {
      weight *= __ldg(a.router->expert_scale + mine.expert);
    }
    a.experts[position] = static_cast<int32_t>(mine.expert);
    a.weights[position] = weight;
  }
  if (lane == 0) {
    *a.count = row.k;
    *a.nonfinite = finite ? nan : 2;
  }
  __syncwarp();
  return finite;
}

// Selects the experts of one row; all lanes of a warp must call it together. The results have the
// bits of SelectRow(), and the same meaning.
template <bool kCosine>
__device__ __forceinline__ bool SelectTop(const TopRowArgs& a, int lane) {
  if (a.router->settings.num_experts <= 64) {
    return SelectTopIn<kCosine, 2>(a, lane);
  }
  return SelectTopIn<kCosine, kMostTopExperts / 32>(a, lane);
}

}  // namespace moeserve::cuda

// One warp selects the experts of one row from the row's products, with the arithmetic of
// kernels/base/routing.h.
#pragma once

#include "kernels/base/routing.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_cosine.cuh"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

// With top-k up to kMostTopRanks experts, and with top-p up to kMostOpenRanksByMaximum experts,
// each rank is found as the maximum of the remaining experts. Otherwise all experts are sorted.
inline constexpr int kMostOpenRanksByMaximum = 8;

MOESERVE_HOST_DEVICE constexpr int RoundUp(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

MOESERVE_HOST_DEVICE constexpr int PowerOfTwoFrom(int n) {
  int p = 32;
  while (p < n) p *= 2;
  return p;
}

// Returns the shared memory that a selecting warp needs, in bytes.
inline int64_t SelectBytes(const RouteSettings& s, bool sort) {
  int64_t bytes = int64_t{8} * RoundUp(s.num_experts, 32);
  if (sort) bytes += int64_t{8} * PowerOfTwoFrom(s.num_experts);
  if (s.score == ScoreKind::kCosine) bytes += int64_t{4} * RoundUp(s.dim, 4);
  return (bytes + 15) / 16 * 16;
}

struct SelectScratch {
  uint64_t* keys;  // [power of two, at least E] only if sorting may be needed
  uint32_t*
      ordered;    // [E rounded up to 32] OrderOfScore() of each score, then of each choice value
  float* values;  // [E rounded up to 32] gate values
  float* u;       // cosine router only: projection of the row [dim]
};

__device__ inline SelectScratch CarveSelect(char* memory, const RouteSettings& s, bool sort) {
  SelectScratch c;
  c.keys = reinterpret_cast<uint64_t*>(memory);
  if (sort) memory += int64_t{8} * PowerOfTwoFrom(s.num_experts);
  c.ordered = reinterpret_cast<uint32_t*>(memory);
  memory += int64_t{4} * RoundUp(s.num_experts, 32);
  c.values = reinterpret_cast<float*>(memory);
  memory += int64_t{4} * RoundUp(s.num_experts, 32);
  c.u = reinterpret_cast<float*>(memory);
  return c;
}

// Calls f(expert, score) for a dot router, whose scores are the row's products. Each lane handles
// every 32nd expert.
template <typename F>
__device__ __forceinline__ void ForEachDotScore(int experts, const RowProducts& products, int lane,
                                                const F& f) {
  constexpr int kBatch = 4;
  for (int first = lane; first < experts; first += 32 * kBatch) {
    float score[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int e = first + j * 32;
      score[j] = e < experts ? products[e] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * 32 < experts) f(first + j * 32, score[j]);
    }
  }
}

// Calls f(expert, score) for a cosine router, for which the products are the row's projection. Each
// lane handles every 32nd expert.
template <typename F>
__device__ __forceinline__ void ForEachCosineScore(const RouterTables& router,
                                                   const RowProducts& products, float* u, int lane,
                                                   const F& f) {
  constexpr int kBatch = 4;
  const RouteSettings& s = router.settings;
  ReadProjection(s, products, u, lane);
  for (int first = lane; first < s.num_experts; first += 32 * kBatch) {
    int at[kBatch];
    float dot[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) at[j] = min(first + j * 32, s.num_experts - 1);
    ColumnDots<false, kTreeLevels>(router.experts, s.num_experts, at, u, s.dim, dot);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * 32 >= s.num_experts) continue;
      f(first + j * 32, WithTemperature(s.temperature, dot[j], router.temperature));
    }
  }
}

// Calls f(expert, score) with the row's scores after bias and temperature. Each lane handles every
// 32nd expert.
template <typename F>
__device__ __forceinline__ void ForEachScore(const RouterTables& router,
                                             const RowProducts& products, float* u, int lane,
                                             const F& f) {
  switch (router.settings.score) {
    case ScoreKind::kDot:
      return ForEachDotScore(router.settings.num_experts, products, lane, f);
    case ScoreKind::kCosine:
      return ForEachCosineScore(router, products, u, lane, f);
  }
}

// Sorts n keys in descending order; n must be a power of two.
__device__ inline void SortKeys(uint64_t* keys, int n, int lane) {
  for (int size = 2; size <= n; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncwarp();
      for (int i = lane; i < n / 2; i += 32) {
        const int low = 2 * i - (i & (stride - 1));
        const uint64_t a = keys[low], b = keys[low + stride];
        if ((a < b) == ((low & size) == 0)) {
          keys[low] = b;
          keys[low + stride] = a;
        }
      }
    }
  }
  __syncwarp();
}

// Finds ranks 0 to k - 1, with k <= 32; each rank is the maximum of the remaining experts. Lane r
// returns the key of rank r.
__device__ inline uint64_t RanksByMaximum(const uint32_t* ordered, int experts, int k, int lane) {
  constexpr uint32_t kNone = 0xffffffffu;
  uint32_t best = 0, best_expert = kNone;
  for (int e = lane; e < experts; e += 32) {
    if (best_expert == kNone || ordered[e] > best) {
      best = ordered[e];
      best_expert = static_cast<uint32_t>(e);
    }
  }
  uint64_t mine = 0;
  for (int rank = 0; rank < k; ++rank) {
    const uint32_t top = __reduce_max_sync(kFullMask, best);
    const uint32_t expert = __reduce_min_sync(kFullMask, best == top ? best_expert : kNone);
    if (lane == rank) mine = SelectionKey(top, static_cast<int>(expert));
    if (best_expert != expert) continue;
    best = 0;
    best_expert = kNone;
    for (int e = lane; e < experts; e += 32) {
      const uint32_t o = ordered[e];
      const bool left = o < top || (o == top && static_cast<uint32_t>(e) > expert);
      if (left && (best_expert == kNone || o > best)) {
        best = o;
        best_expert = static_cast<uint32_t>(e);
      }
    }
  }
  return mine;
}

struct SelectRowArgs {
  const RouterTables* router;
  const int32_t* listed;  // device memory [RouteSettings::k] the row's experts in the table,
                          // or null
  RowProducts products;   // [columns]
  const RouteOverride* override;  // null if there is none
  float* scores;                  // device memory [E] or null
  int k_max;                      // capacity of `experts` and `weights`
  int32_t* experts;               // [k_max] in shared or global memory, like weights and count
  float* weights;                 // [k_max]
  int32_t* count;
  uint8_t* nonfinite;
};

struct RowScores {
  float maximum;  // largest score, where NaN counts as -Inf
  bool nan;       // whether some score is NaN
};

// Computes the row's scores, adds the override's bias, and stores their OrderOfScore() in
// `scratch.ordered`.
__device__ __forceinline__ RowScores ReadScores(const SelectRowArgs& a, const float* bias,
                                                const SelectScratch& scratch, int lane) {
  uint32_t highest = 0;
  bool nan = false;
  ForEachScore(*a.router, a.products, scratch.u, lane, [&](int e, float score) {
    if (a.scores != nullptr) a.scores[e] = score;
    if (bias != nullptr) score += bias[e];
    const uint32_t o = OrderOfScore(score);
    scratch.ordered[e] = o;
    highest = o > highest ? o : highest;
    nan = nan || o == 0;
  });
  highest = __reduce_max_sync(kFullMask, highest);
  nan = __any_sync(kFullMask, nan);
  return {ScoreOfOrder(highest), nan};
}

struct RankedRow {
  bool by_maximum;    // true: lane r has the key of rank r in `rank_key`; false: the keys are in
                      // scratch.keys
  uint64_t rank_key;  // if by_maximum: the key of the rank that equals the lane
};

// Finds the first k ranks, or sorts all experts.
__device__ __forceinline__ RankedRow RankExperts(const RowSelection& row, int experts,
                                                 const SelectScratch& scratch, int lane) {
  const int limit = row.kind == SelectKind::kTopP ? kMostOpenRanksByMaximum : kMostTopRanks;
  if (row.k <= limit) return {true, RanksByMaximum(scratch.ordered, experts, row.k, lane)};
  const int n = PowerOfTwoFrom(experts);
  for (int e = lane; e < n; e += 32) {
    scratch.keys[e] = e < experts ? SelectionKey(scratch.ordered[e], e) : 0;
  }
  SortKeys(scratch.keys, n, lane);
  return {false, 0};
}

struct Selected {
  int count;
  uint64_t last;  // the smallest key of a selected expert
  float sum;      // sum of the gate values, in rank order
};

// Selects experts in rank order. All lanes return the same result.
__device__ __forceinline__ Selected TakeRanks(const RowSelection& row, const RankedRow& ranked,
                                              bool finite, float total,
                                              const SelectScratch& scratch, int lane) {
  Selected selected{0, 0, 0.0f};
  const float threshold = row.p * total;
  const int most = finite ? row.k : CountWithoutScores(row);
  uint64_t rank_key = ranked.rank_key;
  bool reached = false;
  for (int base = 0; base < most && !reached; base += 32) {
    const int rank = base + lane;
    if (!ranked.by_maximum) rank_key = rank < row.k ? scratch.keys[rank] : 0;
    const float value = finite && rank < row.k ? scratch.values[ExpertOfKey(rank_key)] : 0.0f;
    const int in_chunk = most - base < 32 ? most - base : 32;
    int taken = 0;
    while (taken < in_chunk && !reached) {
      const float next = __shfl_sync(kFullMask, value, taken);
      ++taken;
      if (!finite) continue;
      selected.sum = selected.sum + next;
      reached = EndsSelection(row, selected.sum, threshold);
    }
    selected.count += taken;
    selected.last = __shfl_sync(kFullMask, rank_key, taken - 1);
  }
  return selected;
}

// Returns, in every lane, the weight of a selected expert with the gate kSparseMixer.
__device__ __forceinline__ float MixerWeight(const RouteSettings& s, const uint32_t* ordered,
                                             int expert, int lane) {
  const uint64_t key = SelectionKey(ordered[expert], expert);
  const float score = ScoreOfOrder(ordered[expert]);
  float sum = 0.0f;
  for (int begin = lane * 8; begin < s.num_experts; begin += 256) {
    const int end = begin + 8 < s.num_experts ? begin + 8 : s.num_experts;
    for (int e = begin; e < end; ++e) {
      const bool higher = SelectionKey(ordered[e], e) > key;
      sum += higher ? 0.0f : MixerValue(score, ScoreOfOrder(ordered[e]), s.mixer_limit);
    }
  }
  return MixerGate(score, WarpTreeSum(sum), s.scale);
}

// Stores the ids of the selected experts (those whose key is at least selected.last) in ascending
// order, except masked experts, and returns how many were stored. Normally no masked expert is
// selected: its score is -Inf, which ranks behind all finite scores, and no more experts are
// selected than there are unmasked ones (RouteOverride::allowed). It is selected only if an
// unmasked expert has the score -Inf or NaN.
__device__ __forceinline__ int StoreSelected(const SelectRowArgs& a, const Selected& selected,
                                             const float* bias, bool finite, float total,
                                             const SelectScratch& scratch, int lane) {
  const RouteSettings& s = a.router->settings;
  const float divisor = DivisorValue(DivisorOf(s), total, selected.sum);
  int stored = 0;
  for (int base = 0; base < s.num_experts && selected.count > 0; base += 32) {
    const int e = base + lane;
    bool chosen = e < s.num_experts && SelectionKey(scratch.ordered[e], e) >= selected.last;
    if (chosen && bias != nullptr) chosen = !IsMasked(bias[e]);
    const uint32_t mask = __ballot_sync(kFullMask, chosen);
    float weight = 0.0f;
    if (finite && DivisorOf(s) == GateDivisor::kNear) {
      for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int of_lane = __ffs(static_cast<int>(left)) - 1;
        const float w = MixerWeight(s, scratch.ordered, base + of_lane, lane);
        if (lane == of_lane) weight = w;
      }
    } else if (chosen) {
      weight = FinalGate(finite ? scratch.values[e] : 0.0f, divisor, s.scale);
    }
    if (chosen && finite && a.router->expert_scale != nullptr) {
      weight *= __ldg(a.router->expert_scale + e);
    }
    if (chosen) {
      const int at = stored + __popc(mask & ((1u << lane) - 1));
      a.experts[at] = e;
      a.weights[at] = weight;
    }
    stored += __popc(mask);
  }
  return stored;
}

// Replaces the orders of the scores in `scratch.ordered` by the orders of the choice values.
// `total` is the sum of the gate values if NeedsTotal() is true.
__device__ __forceinline__ void OrderByChoice(const RouterTables& router, float total,
                                              const SelectScratch& scratch, int lane) {
  const RouteSettings& s = router.settings;
  for (int e = lane; e < s.num_experts; e += 32) {
    const float bias = router.choice_bias == nullptr ? 0.0f : __ldg(router.choice_bias + e);
    scratch.ordered[e] = OrderOfChoice(ScoreOfOrder(scratch.ordered[e]),
                                       ChoiceValue(s, scratch.values[e], total, bias));
  }
  __syncwarp();
  if (s.best_groups >= s.groups) return;
  static_assert(kMaxExpertGroups == 32, "one group per lane");
  const uint64_t key = lane < s.groups ? GroupKey(s, scratch.ordered, lane) : 0;
  int better = 0;
  for (int g = 0; g < s.groups; ++g) better += __shfl_sync(kFullMask, key, g) > key;
  const uint32_t best = __ballot_sync(kFullMask, lane < s.groups && better < s.best_groups);
  const int size = s.num_experts / s.groups;
  const uint32_t masked = OrderOfScore(MaskedChoice(s.group_mask));
  for (int e = lane; e < s.num_experts; e += 32) {
    if (scratch.ordered[e] != 0 && (best >> (e / size) & 1) == 0) scratch.ordered[e] = masked;
  }
  __syncwarp();
}

// Changes the orders of the experts that the table lists.
__device__ __forceinline__ void OrderByTable(const RouteSettings& s, const int32_t* listed,
                                             const SelectScratch& scratch, int lane) {
  for (int i = lane; i < s.k; i += 32) {
    uint32_t& order = scratch.ordered[__ldg(listed + i)];
    order = OrderInTable(order, i);
  }
  __syncwarp();
}

// Selects the experts of one row; all lanes of a warp must call it together. Returns whether the
// row's largest score is finite.
__device__ inline bool SelectRow(const SelectRowArgs& a, const SelectScratch& scratch, int lane) {
  const RouteSettings& s = a.router->settings;
  const int experts = s.num_experts;
  const float* bias = a.override == nullptr ? nullptr : a.override->bias;
  RowSelection row = a.override == nullptr ? SelectionOf(s) : SelectionOf(s, *a.override);
  row.k = row.k < a.k_max ? row.k : a.k_max;

  const RowScores scores = ReadScores(a, bias, scratch, lane);
  const bool finite = scores.maximum - scores.maximum == 0.0f;
  for (int e = lane; finite && e < experts; e += 32) {
    scratch.values[e] = GateValue(s.gate, ScoreOfOrder(scratch.ordered[e]), scores.maximum);
  }
  __syncwarp();
  float total = 1.0f;
  if (finite && NeedsTotal(s, row)) total = WarpSum(scratch.values, experts, lane);
  if (finite && RanksByChoice(s)) OrderByChoice(*a.router, total, scratch, lane);
  if (finite && row.kind == SelectKind::kTable) OrderByTable(s, a.listed, scratch, lane);

  const RankedRow ranked = RankExperts(row, experts, scratch, lane);
  const Selected selected = TakeRanks(row, ranked, finite, total, scratch, lane);
  const int stored = StoreSelected(a, selected, bias, finite, total, scratch, lane);
  if (lane == 0) {
    *a.count = stored;
    *a.nonfinite = finite ? scores.nan : 2;
  }
  __syncwarp();
  return finite;
}

}  // namespace moeserve::cuda

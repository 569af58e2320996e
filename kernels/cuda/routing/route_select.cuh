// One warp selects the experts of one row from its products, by the routing contract.
#pragma once

#include "kernels/base/exp.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/routing/route_device.h"
#include "kernels/cuda/routing/route_warp.cuh"

namespace moeserve::cuda {

// Up to this many ranks are found one by one; more, or an open end, by sorting all.
inline constexpr int kMostRanksByMaximum = 32;
inline constexpr int kMostOpenRanksByMaximum = 8;

MOESERVE_HOST_DEVICE constexpr int RoundUp(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

MOESERVE_HOST_DEVICE constexpr int PowerOfTwoFrom(int n) {
  int p = 32;
  while (p < n) p *= 2;
  return p;
}

// Shared memory of a selecting warp, in bytes.
inline int64_t SelectBytes(const RouteSettings& s, bool sort) {
  int64_t bytes = int64_t{8} * RoundUp(s.num_experts, 32);
  if (sort) bytes += int64_t{8} * PowerOfTwoFrom(s.num_experts);
  if (s.score == RouteSettings::Score::kCosine) bytes += int64_t{4} * RoundUp(s.dim, 4);
  return (bytes + 15) / 16 * 16;
}

struct SelectScratch {
  uint64_t* keys;     // [power of two from E], only where sorting may be needed
  uint32_t* ordered;  // [E rounded up to 32] scores as integers of the same order, 0: NaN
  float* values;      // [E rounded up to 32] exponentials or sigmoids
  float* u;           // cosine [dim]
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

// Integers that compare as the scores do, +0 equal to -0 and NaN below everything.
__device__ inline uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const uint32_t bits = BitsFromF32(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// NaN counts as -Inf from here on.
__device__ inline float FromOrderedBits(uint32_t ordered) {
  if (ordered == 0) return -__builtin_inff();
  return F32FromBits((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered);
}

// Descending keys: higher scores first, ties by lower expert.
__device__ inline uint64_t SelectionKey(uint32_t ordered, int expert) {
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}

__device__ inline int ExpertOfKey(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// The contract's dot product of a column of `experts` and u by one thread: the 32 partial sums are
// visited in the order in which the tree 16, 8, 4, 2, 1 joins them, so five pending sums suffice.
__device__ inline float ColumnDot(const float* experts, int64_t stride, const float* u, int n) {
  float pending[6];
#pragma unroll
  for (int visit = 0; visit < 32; ++visit) {
    const int l =
        (visit & 1) << 4 | (visit & 2) << 2 | (visit & 4) | (visit & 8) >> 2 | (visit & 16) >> 4;
    float sum = 0.0f;
    for (int begin = l * 8; begin < n; begin += 256) {
      // All loads of a group are on their way at once.
      float w[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        w[j] = begin + j < n ? __ldg(experts + (begin + j) * stride) : 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (begin + j < n) sum = fmaf(w[j], u[begin + j], sum);
      }
    }
    int level = 0;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      if ((visit & (2 * bit - 1)) != 2 * bit - 1) break;
      sum = pending[level++] + sum;
    }
    pending[level] = sum;
  }
  return pending[5];
}

// The contract's sum of n values in shared memory: every lane has it.
__device__ inline float WarpSum(const float* values, int n, int lane) {
  float sum = 0.0f;
  for (int begin = lane * 8; begin < n; begin += 256) {
    const int end = begin + 8 < n ? begin + 8 : n;
    for (int i = begin; i < end; ++i) sum += values[i];
  }
  return WarpTreeSum(sum);
}

__device__ inline void NormaliseRow(float* u, int n, float eps, int lane) {
  float sum = 0.0f;
  for (int begin = lane * 8; begin < n; begin += 256) {
    const int end = begin + 8 < n ? begin + 8 : n;
    for (int i = begin; i < end; ++i) sum = fmaf(u[i], u[i], sum);
  }
  const float norm = sqrtf(WarpTreeSum(sum));
  const float divisor = norm < eps ? eps : norm;
  __syncwarp();
  for (int i = lane; i < n; i += 32) u[i] /= divisor;
  __syncwarp();
}

// Scores of a row after bias and temperature: f(expert, score), each lane for its experts.
template <typename F>
__device__ inline void ForEachScore(const RouterTables& router, const float* products, float* u,
                                    int lane, const F& f) {
  const RouteSettings& s = router.settings;
  if (s.score == RouteSettings::Score::kDot) {
    constexpr int kBatch = 4;
    for (int first = lane; first < s.num_experts; first += 32 * kBatch) {
      float score[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int e = first + j * 32;
        score[j] = e < s.num_experts ? __ldcg(products + e) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j * 32 < s.num_experts) f(first + j * 32, score[j]);
      }
    }
    return;
  }
  for (int i = lane; i < s.dim; i += 32) u[i] = __ldcg(products + i);
  __syncwarp();
  if (s.normalize_row) NormaliseRow(u, s.dim, s.eps, lane);
  for (int e = lane; e < s.num_experts; e += 32) {
    const float dot = ColumnDot(router.experts + e, s.num_experts, u, s.dim);
    switch (s.temperature) {
      case RouteSettings::Temperature::kNone:
        f(e, dot);
        break;
      case RouteSettings::Temperature::kDivide:
        f(e, dot / router.temperature);
        break;
      case RouteSettings::Temperature::kLogScale:
        f(e, dot * router.temperature);
        break;
    }
  }
}

// Descending.
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

// Finds ranks 0 to k - 1, k <= 32, each the maximum of what is left; lane r gets the key of rank r.
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
  const float* products;           // device [columns]
  const DeviceOverride* override;  // or null
  float* scores;                   // device [E] or null
  int k_max;                       // room
  int32_t* experts;                // device [k_max]
  float* weights;                  // device [k_max]
  int32_t* count;
  uint8_t* nonfinite;
  uint8_t* failed;  // of the row's token, or null; set to 1 where no largest score is finite
};

// All lanes of a warp together.
__device__ inline void SelectRow(const SelectRowArgs& a, const SelectScratch& scratch, int lane) {
  const RouteSettings& s = a.router->settings;
  const int experts = s.num_experts;
  bool top_p = s.top_p;
  float p = s.p;
  int k = s.k;
  const float* bias = nullptr;
  if (a.override != nullptr) {
    const DeviceOverride change = *a.override;
    if (change.k > 0) {
      top_p = false;
      k = change.k;
    } else if (change.p > 0.0f) {
      if (!top_p) k = experts;
      top_p = true;
      p = change.p;
    }
    bias = change.bias;
    if (bias != nullptr && change.allowed < k) k = change.allowed;
  }
  k = k < experts ? k : experts;
  k = k < a.k_max ? k : a.k_max;

  uint32_t highest = 0;
  bool nan = false;
  ForEachScore(*a.router, a.products, scratch.u, lane, [&](int e, float score) {
    if (a.scores != nullptr) a.scores[e] = score;
    if (bias != nullptr) score += bias[e];
    const uint32_t o = OrderedBits(score);
    scratch.ordered[e] = o;
    highest = o > highest ? o : highest;
    nan = nan || o == 0;
  });
  highest = __reduce_max_sync(kFullMask, highest);
  nan = __any_sync(kFullMask, nan);
  const float maximum = FromOrderedBits(highest);
  const bool finite = maximum - maximum == 0.0f;

  const bool sigmoid = s.gate == RouteSettings::Gate::kSigmoid;
  const bool over_selected = s.gate == RouteSettings::Gate::kSoftmaxSelected || s.renormalize;
  for (int e = lane; finite && e < experts; e += 32) {
    const float score = FromOrderedBits(scratch.ordered[e]);
    scratch.values[e] =
        sigmoid ? 1.0f / (1.0f + ContractExp(-score)) : ContractExp(score - maximum);
  }
  __syncwarp();
  float total = 1.0f;
  if (finite && !sigmoid && (top_p || !over_selected)) {
    total = WarpSum(scratch.values, experts, lane);
  }

  const bool by_maximum = k <= (top_p ? kMostOpenRanksByMaximum : kMostRanksByMaximum);
  uint64_t rank_key = 0;
  if (by_maximum) {
    rank_key = RanksByMaximum(scratch.ordered, experts, k, lane);
  } else {
    const int n = PowerOfTwoFrom(experts);
    for (int e = lane; e < n; e += 32) {
      scratch.keys[e] = e < experts ? SelectionKey(scratch.ordered[e], e) : 0;
    }
    SortKeys(scratch.keys, n, lane);
  }
  // Sums run in rank order, the same in all lanes.
  int selected = 0;
  float sum = 0.0f;
  uint64_t last = 0;
  const float threshold = p * total;
  bool reached = false;
  for (int base = 0; base < k && !reached; base += 32) {
    const int rank = base + lane;
    if (!by_maximum) rank_key = rank < k ? scratch.keys[rank] : 0;
    const float value = finite && rank < k ? scratch.values[ExpertOfKey(rank_key)] : 0.0f;
    const int in_chunk = k - base < 32 ? k - base : 32;
    int taken = 0;
    while (taken < in_chunk && !reached) {
      const float next = __shfl_sync(kFullMask, value, taken);
      ++taken;
      if (finite) {
        sum = sum + next;
        reached = top_p && (s.strict ? sum > threshold : sum >= threshold);
      } else {
        reached = top_p;
      }
    }
    selected += taken;
    last = __shfl_sync(kFullMask, rank_key, taken - 1);
  }
  const float denominator = over_selected ? sum : total;

  // The selected ones are those from the last key up; stored by ascending expert.
  int stored = 0;
  for (int base = 0; base < experts && selected > 0; base += 32) {
    const int e = base + lane;
    bool chosen = e < experts && SelectionKey(scratch.ordered[e], e) >= last;
    // A masked expert gets here only where the scores of all others are -Inf as well or a share of
    // 1 is asked for.
    if (chosen && bias != nullptr) chosen = fabsf(bias[e]) != __builtin_inff();
    const uint32_t mask = __ballot_sync(kFullMask, chosen);
    if (chosen) {
      float gate = 0.0f;
      if (finite && denominator != 0.0f) {
        const float value = scratch.values[e];
        gate = sigmoid && !over_selected ? value : value / denominator;
      }
      const int at = stored + __popc(mask & ((1u << lane) - 1));
      a.experts[at] = e;
      a.weights[at] = gate * s.scale;
    }
    stored += __popc(mask);
  }
  if (lane == 0) {
    *a.count = stored;
    *a.nonfinite = finite ? nan : 2;
    if (!finite && a.failed != nullptr) *a.failed = 1;
  }
  __syncwarp();
}

}  // namespace moeserve::cuda

// The arithmetic of routing: the same bits on every device and instruction set. Each device adds
// its own way through the rows and its own way to find the largest scores.
//
// Functions are static: the CPU kernels include this file under several instruction sets, and a
// merged copy could be one that the processor cannot run. Compilers must not fuse operations.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/exp.h"
#include "kernels/base/host_device.h"
#include "kernels/route_settings.h"

namespace moeserve {

// Sums: lane l of 32 adds the groups of 8 elements l, l + 32, ... in ascending order, products
// with fused multiply-adds; a tree 16, 8, 4, 2, 1 joins the lanes.
inline constexpr int kRoutingLanes = 32;
inline constexpr int kRoutingGroup = 8;

// Leaves the sum in lane 0 as well.
static inline float ContractTreeSum(float* lane) {
  for (int width = kRoutingLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] = lane[l] + lane[l + width];
  }
  return lane[0];
}

static inline float ContractDot(const float* a, const float* b, int64_t n) {
  float lane[kRoutingLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t l = i / kRoutingGroup % kRoutingLanes;
    lane[l] = __builtin_fmaf(a[i], b[i], lane[l]);
  }
  return ContractTreeSum(lane);
}

static inline float ContractSum(const float* v, int n) {
  float lane[kRoutingLanes] = {};
  for (int begin = 0; begin < n; begin += kRoutingGroup) {
    float& sum = lane[begin / kRoutingGroup % kRoutingLanes];
    const int end = begin + kRoutingGroup < n ? begin + kRoutingGroup : n;
    float of_lane = sum;
    for (int i = begin; i < end; ++i) of_lane += v[i];
    sum = of_lane;
  }
  return ContractTreeSum(lane);
}

// Scores.

// Products of a row with a router's first matrix: the scores of a dot router, the projection of a
// cosine one.
MOESERVE_HOST_DEVICE static inline int ProductsOf(const RouteSettings& s) {
  switch (s.score) {
    case ScoreKind::kDot:
      return s.num_experts;
    case ScoreKind::kCosine:
      return s.dim;
  }
  return 0;
}

// What a vector with this sum of squares is divided by to have length 1.
MOESERVE_HOST_DEVICE static inline float NormDivisor(float squares, float eps) {
  const float norm = sqrtf(squares);
  return norm < eps ? eps : norm;
}

// Expert vectors [E, dim] of a cosine router.
static inline void NormaliseExperts(const RouteSettings& s, float* experts) {
  if (!s.normalize_expert) return;
  for (int e = 0; e < s.num_experts; ++e) {
    float* v = experts + int64_t{e} * s.dim;
    const float divisor = NormDivisor(ContractDot(v, v, s.dim), s.eps);
    for (int i = 0; i < s.dim; ++i) v[i] /= divisor;
  }
}

// The divisor or factor that a stored temperature t stands for. As in paper and public code: a
// divisor t of at least 1e-4, or a factor e^t of at most 100.
static inline float ResolvedTemperature(TemperatureKind kind, float t) {
  constexpr float kLeastDivisor = 1e-4f;
  constexpr float kLargestExponent = 4.605170185988092f;
  switch (kind) {
    case TemperatureKind::kNone:
      return 1.0f;
    case TemperatureKind::kDivide:
      return t < kLeastDivisor ? kLeastDivisor : t;
    case TemperatureKind::kLogScale:
      return ContractExp(kLargestExponent < t ? kLargestExponent : t);
  }
  return 1.0f;
}

MOESERVE_HOST_DEVICE static inline float WithTemperature(TemperatureKind kind, float score,
                                                         float resolved) {
  switch (kind) {
    case TemperatureKind::kNone:
      return score;
    case TemperatureKind::kDivide:
      return score / resolved;
    case TemperatureKind::kLogScale:
      return score * resolved;
  }
  return score;
}

// Order of experts: descending score, equal scores by ascending expert, NaN last, +0 equal to -0.

MOESERVE_HOST_DEVICE static inline uint32_t OrderOfScore(float score) {
  return score != score ? 0 : OrderOfF32(score);
}
// NaN becomes -Inf.
MOESERVE_HOST_DEVICE static inline float ScoreOfOrder(uint32_t order) {
  return order == 0 ? -__builtin_inff() : F32OfOrder(order);
}

// Descending keys have the order of experts; no expert has the key 0.
MOESERVE_HOST_DEVICE static inline uint64_t SelectionKey(uint32_t order, int expert) {
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}
MOESERVE_HOST_DEVICE static inline int ExpertOfKey(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// Selection.

// How one row selects: the router's settings, changed by an override where there is one.
struct RowSelection {
  SelectKind kind;
  TopPCompare compare;
  int k;  // the largest number of experts, at most E
  float p;
};

MOESERVE_HOST_DEVICE static inline RowSelection SelectionOf(const RouteSettings& s) {
  return {s.select, s.compare, s.k < s.num_experts ? s.k : s.num_experts, s.p};
}

MOESERVE_HOST_DEVICE static inline RowSelection SelectionOf(const RouteSettings& s,
                                                            const RouteOverride& change) {
  RowSelection row = SelectionOf(s);
  if (change.k > 0) {
    row.kind = SelectKind::kTopK;
    row.k = change.k < s.num_experts ? change.k : s.num_experts;
  } else if (change.p > 0.0f) {
    // A router's own limit holds for top-p alone.
    if (row.kind != SelectKind::kTopP) row.k = s.num_experts;
    row.kind = SelectKind::kTopP;
    row.p = change.p;
  }
  if (change.bias != nullptr && change.allowed < row.k) row.k = change.allowed;
  return row;
}

// The most experts that any row selects. `overrides`: a range of RouteOverride; which experts they
// mask does not count.
template <typename Overrides>
static inline int WidestRow(const RouteSettings& s, const Overrides& overrides) {
  int widest = SelectionOf(s).k;
  for (const RouteOverride& o : overrides) {
    const int k = SelectionOf(s, {.k = o.k, .p = o.p}).k;
    widest = k > widest ? k : widest;
  }
  return widest;
}

// Whether an override's bias forbids an expert.
MOESERVE_HOST_DEVICE static inline bool IsMasked(float bias) {
  return bias == -__builtin_inff() || bias == __builtin_inff();
}

// Experts of a row that has no finite largest score; all their weights are 0.
MOESERVE_HOST_DEVICE static inline int CountWithoutScores(const RowSelection& row) {
  switch (row.kind) {
    case SelectKind::kTopK:
      return row.k;
    case SelectKind::kTopP:
      return row.k < 1 ? row.k : 1;
  }
  return row.k;
}

// Whether the selection ends with an expert before it has k of them. `sum`: the gate values of the
// experts so far, added in rank order; `threshold`: p times the sum over all experts.
MOESERVE_HOST_DEVICE static inline bool EndsSelection(const RowSelection& row, float sum,
                                                      float threshold) {
  switch (row.kind) {
    case SelectKind::kTopK:
      return false;
    case SelectKind::kTopP:
      switch (row.compare) {
        case TopPCompare::kGe:
          return sum >= threshold;
        case TopPCompare::kGt:
          return sum > threshold;
      }
  }
  return false;
}

// Gates. The weight of a selected expert is FinalGate(value, divisor, scale).

// The gate value of a score; `maximum` is the row's largest score, finite.
MOESERVE_HOST_DEVICE static inline float GateValue(GateKind kind, float score, float maximum) {
  switch (kind) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
      return ContractExp(score - maximum);
    case GateKind::kSigmoid:
      return 1.0f / (1.0f + ContractExp(-score));
  }
  return 0.0f;
}

// The gate values of n scores. The kind is a constant in each loop, which compilers can then put
// into vectors.
static inline void GateValues(GateKind kind, const float* scores, int n, float maximum,
                              float* values) {
  switch (kind) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
      for (int e = 0; e < n; ++e) values[e] = GateValue(GateKind::kSoftmax, scores[e], maximum);
      return;
    case GateKind::kSigmoid:
      for (int e = 0; e < n; ++e) values[e] = GateValue(GateKind::kSigmoid, scores[e], maximum);
      return;
  }
}

// GateValue() in double, for statistics.
static inline double GateValueInDouble(GateKind kind, double score, double maximum) {
  switch (kind) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
      return std::exp(score - maximum);
    case GateKind::kSigmoid:
      return 1.0 / (1.0 + std::exp(-score));
  }
  return 0.0;
}

MOESERVE_HOST_DEVICE static inline GateDivisor DivisorOf(const RouteSettings& s) {
  return s.renormalize ? GateDivisor::kSelectedOnly : DivisorOf(s.gate);
}

// Whether the weights of a row depend on the sum of the gate values over all experts. Otherwise
// that sum is not computed, and 1 is used in its place.
MOESERVE_HOST_DEVICE static inline bool NeedsTotal(const RouteSettings& s,
                                                   const RowSelection& row) {
  if (DivisorOf(s.gate) == GateDivisor::kOne) return false;
  return row.kind == SelectKind::kTopP || DivisorOf(s) == GateDivisor::kAllExperts;
}

// `total`: the sum over all experts, 1 where it is not needed; `selected`: over the selected ones.
MOESERVE_HOST_DEVICE static inline float DivisorValue(GateDivisor divisor, float total,
                                                      float selected) {
  switch (divisor) {
    case GateDivisor::kOne:
      return 1.0f;
    case GateDivisor::kAllExperts:
      return total;
    case GateDivisor::kSelectedOnly:
      return selected;
  }
  return 1.0f;
}

MOESERVE_HOST_DEVICE static inline float FinalGate(float value, float divisor, float scale) {
  const float gate = divisor != 0.0f ? value / divisor : 0.0f;
  return gate * scale;
}

}  // namespace moeserve

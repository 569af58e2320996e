// The arithmetic of routing: its results have the same bits on every device and instruction set.
// Each device implements the loop over rows and the search for the largest scores in its own way.
//
// Functions are static because the CPU kernels include this file in translation units for several
// instruction sets: if they had external linkage, the linker could keep a copy that the processor
// cannot run. Compilers must not fuse a multiplication and an addition.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/exp.h"
#include "kernels/base/host_device.h"
#include "kernels/base/route_settings.h"

namespace moeserve {

// The order of a sum over n elements: element i belongs to group i / 8; lane l of 32 adds the
// elements of groups l, l + 32, l + 64, ... in ascending order (products with fused multiply-adds).
// Then, for w = 16, 8, 4, 2, 1 in this order, lane l + w is added to lane l for all l < w.
inline constexpr int kRoutingLanes = 32;
inline constexpr int kRoutingGroup = 8;

// Returns the sum of 32 lanes; also stores it in lane[0].
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

// Rows

// Returns whether the scores are those of a changed row: normalised or scaled.
MOESERVE_HOST_DEVICE static inline bool ChangesRow(const RouteSettings& s) {
  return s.row_norm != RowNorm::kNone || s.row_scale != 1.0f;
}

// Returns the factor that normalises a row of n elements with this sum of squares (ContractDot() of
// the row and itself): 1 / rms(row).
MOESERVE_HOST_DEVICE static inline float RowFactor(float squares, int n, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(n) + eps);
}

// Returns an element of the changed row. `factor` is the result of RowFactor(); `weight` is used
// only by kRmsWeight.
MOESERVE_HOST_DEVICE static inline float ChangedElement(const RouteSettings& s, float x,
                                                        float factor, float weight) {
  switch (s.row_norm) {
    case RowNorm::kNone:
      return x * s.row_scale;
    case RowNorm::kRms:
      return x * factor * s.row_scale;
    case RowNorm::kRmsWeight:
      return x * factor * weight * s.row_scale;
  }
  return x;
}

// Scores

// Returns the number of dot products of a row with the router's first matrix: one per expert for a
// dot router (the scores), `dim` for a cosine router (the projection).
MOESERVE_HOST_DEVICE static inline int ProductsOf(const RouteSettings& s) {
  switch (s.score) {
    case ScoreKind::kDot:
      return s.num_experts;
    case ScoreKind::kCosine:
      return s.dim;
  }
  return 0;
}

// Returns the divisor that normalises a vector with this sum of squares: its length, but at least
// eps.
MOESERVE_HOST_DEVICE static inline float NormDivisor(float squares, float eps) {
  const float norm = sqrtf(squares);
  return norm < eps ? eps : norm;
}

// Normalises the expert vectors [E, dim] of a cosine router in place, if the settings ask for it.
static inline void NormaliseExperts(const RouteSettings& s, float* experts) {
  if (!s.normalize_expert) return;
  for (int e = 0; e < s.num_experts; ++e) {
    float* v = experts + int64_t{e} * s.dim;
    const float divisor = NormDivisor(ContractDot(v, v, s.dim), s.eps);
    for (int i = 0; i < s.dim; ++i) v[i] /= divisor;
  }
}

// Returns what WithTemperature() applies for a stored temperature t: the divisor t, but at least
// 1e-4 (kDivide), or the factor e^t, but at most 100 (kLogScale).
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

// The ranking of experts: descending score; equal scores (+0 equals -0) by ascending expert; NaN
// last.

MOESERVE_HOST_DEVICE static inline uint32_t OrderOfScore(float score) {
  return score != score ? 0 : OrderOfF32(score);
}
// Inverse of OrderOfScore(), except that NaN becomes -Inf.
MOESERVE_HOST_DEVICE static inline float ScoreOfOrder(uint32_t order) {
  return order == 0 ? -__builtin_inff() : F32OfOrder(order);
}

// Returns a key such that sorting by descending key ranks the experts. The key of an expert is
// never 0.
MOESERVE_HOST_DEVICE static inline uint64_t SelectionKey(uint32_t order, int expert) {
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}
MOESERVE_HOST_DEVICE static inline int ExpertOfKey(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// Selection

// How experts are selected for one row: the router's settings, as changed by the row's
// RouteOverride if it has one.
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
    // The router's own limit k applies only if the router itself selects by top-p.
    if (row.kind != SelectKind::kTopP) row.k = s.num_experts;
    row.kind = SelectKind::kTopP;
    row.p = change.p;
  }
  if (change.bias != nullptr && change.allowed < row.k) row.k = change.allowed;
  return row;
}

// Returns the largest number of experts that any row can select. `overrides` is a range of
// RouteOverride, of which only k and p are used: experts that a bias masks are not subtracted.
template <typename Overrides>
static inline int WidestRow(const RouteSettings& s, const Overrides& overrides) {
  int widest = SelectionOf(s).k;
  for (const RouteOverride& o : overrides) {
    const int k = SelectionOf(s, {.k = o.k, .p = o.p}).k;
    widest = k > widest ? k : widest;
  }
  return widest;
}

// Returns whether the bias of an override forbids an expert, which an infinite bias does.
MOESERVE_HOST_DEVICE static inline bool IsMasked(float bias) {
  return bias == -__builtin_inff() || bias == __builtin_inff();
}

// Returns the number of experts selected for a row whose largest score is not finite; all of them
// get weight 0.
MOESERVE_HOST_DEVICE static inline int CountWithoutScores(const RowSelection& row) {
  switch (row.kind) {
    case SelectKind::kTopK:
    case SelectKind::kTable:
      return row.k;
    case SelectKind::kTopP:
      return row.k < 1 ? row.k : 1;
  }
  return row.k;
}

// Returns whether the selection stops after the current expert, although it has fewer than k
// experts. `sum`: the gate values of the experts selected so far, added in rank order; `threshold`:
// p times the sum of the gate values of all experts.
MOESERVE_HOST_DEVICE static inline bool EndsSelection(const RowSelection& row, float sum,
                                                      float threshold) {
  switch (row.kind) {
    case SelectKind::kTopK:
    case SelectKind::kTable:
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

// Returns sqrt(log(1 + e^score)).
MOESERVE_HOST_DEVICE static inline float SqrtSoftplus(float score) {
  const float magnitude = score < 0.0f ? -score : score;
  const float positive = score < 0.0f ? 0.0f : score;
  return sqrtf(positive + ContractLog1p(ContractExp(-magnitude)));
}

// Returns the gate value for a score; `maximum` is the row's largest score, finite. Values are
// never negative, do not fall when the score rises, and are 0 for a score of -infinity.
MOESERVE_HOST_DEVICE static inline float GateValue(GateKind kind, float score, float maximum) {
  switch (kind) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
    case GateKind::kSparseMixer:
      return ContractExp(score - maximum);
    case GateKind::kSigmoid:
      return 1.0f / (1.0f + ContractExp(-score));
    case GateKind::kSqrtSoftplus:
      return SqrtSoftplus(score);
  }
  return 0.0f;
}

// Computes the gate values of n scores. In each loop the kind is a constant, so that compilers can
// vectorise the loop.
static inline void GateValues(GateKind kind, const float* scores, int n, float maximum,
                              float* values) {
  switch (kind) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
    case GateKind::kSparseMixer:
      for (int e = 0; e < n; ++e) values[e] = GateValue(GateKind::kSoftmax, scores[e], maximum);
      return;
    case GateKind::kSigmoid:
      for (int e = 0; e < n; ++e) values[e] = GateValue(GateKind::kSigmoid, scores[e], maximum);
      return;
    case GateKind::kSqrtSoftplus:
      for (int e = 0; e < n; ++e) values[e] = SqrtSoftplus(scores[e]);
      return;
  }
}

// Like GateValue(), but in double precision; used for statistics.
static inline double GateValueInDouble(GateKind kind, double score, double maximum) {
  switch (kind) {
    case GateKind::kSoftmax:
    case GateKind::kSoftmaxSelected:
    case GateKind::kSparseMixer:
      return std::exp(score - maximum);
    case GateKind::kSigmoid:
      return 1.0 / (1.0 + std::exp(-score));
    case GateKind::kSqrtSoftplus:
      return std::sqrt((score < 0.0 ? 0.0 : score) + std::log1p(std::exp(-std::abs(score))));
  }
  return 0.0;
}

MOESERVE_HOST_DEVICE static inline GateDivisor DivisorOf(const RouteSettings& s) {
  return s.renormalize ? GateDivisor::kSelectedOnly : DivisorOf(s.gate);
}

// Choice: DeepSeek-V2 and V3 ("DeepSeek-V3 Technical Report", eq. 16) rank experts by values that
// differ from the scores and from the weights.

// Returns whether experts are ranked by choice values instead of scores.
MOESERVE_HOST_DEVICE static inline bool RanksByChoice(const RouteSettings& s) {
  return s.choice_bias || s.best_groups < s.groups;
}

// Returns the choice value of an expert: its gate value, which is divided by the sum over all
// experts unless the gate is a value of its own, plus the expert's choice bias.
MOESERVE_HOST_DEVICE static inline float ChoiceValue(const RouteSettings& s, float value,
                                                     float total, float bias) {
  const float share = DivisorOf(s.gate) == GateDivisor::kOne ? value : value / total;
  return share + bias;
}

// Returns the order of an expert by its choice value. An expert with the score -Inf, such as one
// that an override masks, ranks last, like NaN.
MOESERVE_HOST_DEVICE static inline uint32_t OrderOfChoice(float score, float choice) {
  return score == -__builtin_inff() ? 0 : OrderOfScore(choice);
}

// Returns the score of a group from the two largest choice values of its experts.
MOESERVE_HOST_DEVICE static inline float GroupScore(GroupScoreKind kind, float largest,
                                                    float second) {
  switch (kind) {
    case GroupScoreKind::kMax:
      return largest;
    case GroupScoreKind::kSumOfTwo:
      return largest + second;
  }
  return largest;
}

// Returns the choice value of experts outside of the best groups.
MOESERVE_HOST_DEVICE static inline float MaskedChoice(GroupMaskKind kind) {
  switch (kind) {
    case GroupMaskKind::kMinusInfinity:
      return -__builtin_inff();
    case GroupMaskKind::kZero:
      return 0.0f;
  }
  return 0.0f;
}

// Returns the key of group `group` with the choice orders `orders` [E]: groups are ranked by
// descending key.
MOESERVE_HOST_DEVICE static inline uint64_t GroupKey(const RouteSettings& s, const uint32_t* orders,
                                                     int group) {
  const int size = s.num_experts / s.groups;
  uint32_t largest = 0, second = 0;
  for (int i = group * size; i < (group + 1) * size; ++i) {
    const uint32_t order = orders[i];
    if (order > largest) {
      second = largest;
      largest = order;
    } else if (order > second) {
      second = order;
    }
  }
  const float score = GroupScore(s.group_score, ScoreOfOrder(largest), ScoreOfOrder(second));
  return SelectionKey(OrderOfScore(score), group);
}

// Table: the experts that the table lists for the row's token rank before all others, in the order
// of the table. An expert with the score -Inf, such as one that an override masks, keeps its rank;
// so the best other expert takes its place.

// Returns the order of the expert at `position` of the table's row, with the score order `order`.
MOESERVE_HOST_DEVICE static inline uint32_t OrderInTable(uint32_t order, int position) {
  const uint32_t none = OrderOfF32(-__builtin_inff());
  return order <= none ? order : 0xffffffffu - static_cast<uint32_t>(position);
}

// Returns whether the weights of a row or its choice values depend on the sum of the gate values
// over all experts. If not, that sum is not computed, and 1 is used instead.
MOESERVE_HOST_DEVICE static inline bool NeedsTotal(const RouteSettings& s,
                                                   const RowSelection& row) {
  if (DivisorOf(s.gate) == GateDivisor::kOne) return false;
  if (RanksByChoice(s)) return true;
  return row.kind == SelectKind::kTopP || DivisorOf(s) == GateDivisor::kAllExperts;
}

// `total` is the sum of the gate values over all experts (1 if NeedsTotal() is false), `selected`
// the sum over the selected experts.
MOESERVE_HOST_DEVICE static inline float DivisorValue(GateDivisor divisor, float total,
                                                      float selected) {
  switch (divisor) {
    case GateDivisor::kOne:
      return 1.0f;
    case GateDivisor::kAllExperts:
      return total;
    case GateDivisor::kSelectedOnly:
      return selected;
    case GateDivisor::kNear:
      break;  // MixerValue() replaces the gate values
  }
  return 1.0f;
}

MOESERVE_HOST_DEVICE static inline float FinalGate(float value, float divisor, float scale) {
  const float gate = divisor != 0.0f ? value / divisor : 0.0f;
  return gate * scale;
}

// Sparse mixer, the gate of Phi-3.5-MoE ("GRIN: GRadient-INformed MoE", section 2, as the authors'
// code computes it at inference): the weight of a selected expert is MixerGate(score, sum, scale),
// where the sum is that of MixerValue() over the expert itself and all experts that rank lower.

// Returns exp(other - score), or 0 if the score `other` is not near `score`: if the difference,
// relative to the larger of `score` and |other|, exceeds `limit`.
MOESERVE_HOST_DEVICE static inline float MixerValue(float score, float other, float limit) {
  const float magnitude = other < 0.0f ? -other : other;
  const float scale = magnitude < score ? score : magnitude;
  // Two scores of 0 make the quotient NaN, which does not exceed the limit.
  return (score - other) / scale > limit ? 0.0f : ContractExp(other - score);
}

// Returns the weight of a selected expert; 0 for the score -Inf.
MOESERVE_HOST_DEVICE static inline float MixerGate(float score, float sum, float scale) {
  return score == -__builtin_inff() ? 0.0f : FinalGate(1.0f, sum, scale);
}

// Stores the terms of the sum of an expert in `values` [E]; those of experts that rank higher are
// 0. No score is NaN.
static inline void MixerValues(const RouteSettings& s, const float* scores, int expert,
                               float* values) {
  const float score = scores[expert];
  for (int e = 0; e < s.num_experts; ++e) {
    const bool higher = scores[e] > score || (scores[e] == score && e < expert);
    values[e] = higher ? 0.0f : MixerValue(score, scores[e], s.mixer_limit);
  }
}

}  // namespace moeserve

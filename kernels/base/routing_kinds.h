// How a router scores, gates and selects experts: enums with their tables of traits (base/kinds.h).
//
// A new kind needs a value and its traits in this file, and its arithmetic in
// kernels/base/routing.h, which both backends and the statistics use. model_loaders/README.md
// documents what the kinds mean.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/kinds.h"
#include "kernels/base/host_device.h"

namespace moeserve {

enum class ScoreKind : uint8_t { kDot, kCosine };
constexpr NameTraits Traits(ScoreKind k) { return NameIn({"dot", "cosine"}, k); }

// How a router normalises its rows before the scores; its experts get the rows as they are. The
// norms divide by the root mean square of the row; kRmsWeight also multiplies by learned weights.
enum class RowNorm : uint8_t { kNone, kRms, kRmsWeight };

struct RowNormTraits {
  std::string_view name;    // in configuration files
  std::string_view suffix;  // appended to the description of a score
};

constexpr RowNormTraits Traits(RowNorm norm) {
  switch (norm) {
    case RowNorm::kNone:
      return {"none", ""};
    case RowNorm::kRms:
      return {"rms", " of rms-normalized rows"};
    case RowNorm::kRmsWeight:
      return {"rms_weight", " of rms-normalized and weighted rows"};
  }
  return {};
}

// What a learned temperature does to the scores of a cosine router.
enum class TemperatureKind : uint8_t { kNone, kDivide, kLogScale };

struct TemperatureTraits {
  std::string_view name;    // in configuration files
  std::string_view suffix;  // appended to the description of a score
};

constexpr TemperatureTraits Traits(TemperatureKind kind) {
  switch (kind) {
    case TemperatureKind::kNone:
      return {"none", ""};
    case TemperatureKind::kDivide:
      return {"divide", ", divided by a temperature"};
    case TemperatureKind::kLogScale:
      return {"log_scale", ", times exp(temperature)"};
  }
  return {};
}

// kSqrtSoftplus is sqrt(log(1 + e^score)).
enum class GateKind : uint8_t { kSoftmax, kSigmoid, kSoftmaxSelected, kSparseMixer, kSqrtSoftplus };

struct GateTraits {
  std::string_view name;         // in configuration files
  std::string_view description;  // shown to users
};

constexpr GateTraits Traits(GateKind kind) {
  switch (kind) {
    case GateKind::kSoftmax:
      return {"softmax", "softmax"};
    case GateKind::kSigmoid:
      return {"sigmoid", "sigmoid"};
    case GateKind::kSoftmaxSelected:
      return {"softmax_selected", "softmax of the selected"};
    case GateKind::kSparseMixer:
      return {"sparse_mixer", "sparse mixer"};
    case GateKind::kSqrtSoftplus:
      return {"sqrt_softplus", "square root of softplus"};
  }
  return {};
}

// What the gate values of experts are divided by to get their weights.
enum class GateDivisor : uint8_t {
  kOne,           // 1: the gate value itself is the weight
  kAllExperts,    // the sum of the gate values of all experts
  kSelectedOnly,  // the sum of the gate values of the selected experts, so weights exist only
                  // after selection
  kNear           // a sum of its own for each expert: see MixerValue() in kernels/base/routing.h
};

MOESERVE_HOST_DEVICE static constexpr GateDivisor DivisorOf(GateKind kind) {
  switch (kind) {
    case GateKind::kSoftmax:
      return GateDivisor::kAllExperts;
    case GateKind::kSigmoid:
    case GateKind::kSqrtSoftplus:
      return GateDivisor::kOne;
    case GateKind::kSoftmaxSelected:
      return GateDivisor::kSelectedOnly;
    case GateKind::kSparseMixer:
      return GateDivisor::kNear;
  }
  return GateDivisor::kOne;
}

// kTopK selects a fixed number of experts, kTopP as many as are needed for their gate values to
// reach p times the sum over all experts. kTable selects those that a table lists for the row's
// token; its gate alone depends on the scores.
enum class SelectKind : uint8_t { kTopK, kTopP, kTable };
constexpr NameTraits Traits(SelectKind k) { return NameIn({"top_k", "top_p", "table"}, k); }

// Whether top-p stops when the selected gate values reach p times the sum over all experts (kGe) or
// only when they exceed it (kGt).
enum class TopPCompare : uint8_t { kGe, kGt };

struct TopPCompareTraits {
  std::string_view name;    // in configuration files
  std::string_view symbol;  // in descriptions
};

constexpr TopPCompareTraits Traits(TopPCompare compare) {
  switch (compare) {
    case TopPCompare::kGe:
      return {"ge", ">="};
    case TopPCompare::kGt:
      return {"gt", ">"};
  }
  return {};
}

// How the choice values of a group's experts make the score of the group: kSumOfTwo adds the two
// largest.
enum class GroupScoreKind : uint8_t { kMax, kSumOfTwo };
constexpr NameTraits Traits(GroupScoreKind k) { return NameIn({"max", "sum_of_two"}, k); }

// What the choice values of experts outside of the best groups become. With kZero, such an expert
// can still be selected if other choice values are negative.
enum class GroupMaskKind : uint8_t { kMinusInfinity, kZero };
constexpr NameTraits Traits(GroupMaskKind k) { return NameIn({"minus_infinity", "zero"}, k); }

// The largest number of groups of experts.
inline constexpr int kMaxExpertGroups = 32;

}  // namespace moeserve

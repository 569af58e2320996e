// The settings of a router, and the changes of these settings for a single row, as kernels read
// them.
#pragma once

#include <cstdint>

#include "kernels/base/routing_kinds.h"

namespace moeserve {

// model_loaders/README.md documents the kinds of scores, gates and selections.
struct RouteSettings {
  int num_experts = 1;  // E
  int input_width = 1;  // c

  // Before the scores, a row x becomes x / rms(x) * weight * row_scale (see ChangedElement() in
  // kernels/base/routing.h). The experts get x.
  RowNorm row_norm = RowNorm::kNone;
  float norm_eps = 1e-5f;  // added to the mean of squares
  float row_scale = 1.0f;

  ScoreKind score = ScoreKind::kDot;
  int dim = 0;                   // size of the projection of a cosine router
  bool normalize_row = true;     // cosine router: divide projected rows by their length
  bool normalize_expert = true;  // cosine router: divide expert vectors by their length
  float eps = 1e-12f;            // smallest divisor of both
  TemperatureKind temperature = TemperatureKind::kNone;

  GateKind gate = GateKind::kSoftmax;
  float mixer_limit = 0.0f;  // gate kSparseMixer: largest distance of a score that counts
  SelectKind select = SelectKind::kTopK;
  int k = 1;       // top-k, table: experts per row; top-p: the largest number of experts per row
  float p = 0.0f;  // top-p: share of the sum of all gate values that the selected ones must reach
  TopPCompare compare = TopPCompare::kGe;

  // Experts are ranked by choice values instead of scores if `choice_bias` is set or `best_groups`
  // is less than `groups` (see ChoiceValue() in kernels/base/routing.h).
  bool choice_bias = false;  // every expert has a bias that changes its rank, but not its weight
  int groups = 1;            // groups of adjacent experts, equally large; at most kMaxExpertGroups
  int best_groups = 1;       // only experts of this many groups, those with the best scores, count
  GroupScoreKind group_score = GroupScoreKind::kMax;
  GroupMaskKind group_mask = GroupMaskKind::kMinusInfinity;

  bool renormalize = false;   // divide gate values by the sum of the selected ones
  float scale = 1.0f;         // multiplies every weight
  bool expert_scale = false;  // every expert has a factor of its weights, applied last
};

// Changes the selection of experts for one row.
struct RouteOverride {
  int32_t k = 0;                // 0 keeps the router's selection; otherwise top-k with this k
  float p = 0.0f;               // 0 keeps the router's selection; otherwise top-p with this share
  const float* bias = nullptr;  // [E] added to the scores, or null; -inf excludes the expert. In
                                // host memory; for CUDA kernels in device memory
  int32_t allowed = 0;  // used if bias is set: number of experts that are not excluded, at least 1
};

}  // namespace moeserve

// The settings of a router and the changes that one row can make to them, as kernels take them.
#pragma once

#include <cstdint>

#include "kernels/base/routing_kinds.h"

namespace moeserve {

// See engine/spec/spec.h for the meanings.
struct RouteSettings {
  int num_experts = 1;  // E
  int input_width = 1;  // c

  ScoreKind score = ScoreKind::kDot;
  int dim = 0;  // cosine
  bool normalize_row = true;
  bool normalize_expert = true;
  float eps = 1e-12f;
  TemperatureKind temperature = TemperatureKind::kNone;

  GateKind gate = GateKind::kSoftmax;
  SelectKind select = SelectKind::kTopK;
  int k = 1;  // top-k: experts of a row; top-p: the largest number of them
  float p = 0.0f;
  TopPCompare compare = TopPCompare::kGe;
  bool renormalize = false;
  float scale = 1.0f;
};

// Changes the selection of one row.
struct RouteOverride {
  int32_t k = 0;                // 0: as the router's settings say; else top-k with this many
  float p = 0.0f;               // 0: as the settings say; else top-p with this share
  const float* bias = nullptr;  // [E] added to the scores; -inf: the expert is never chosen.
                                // In host memory, in device memory for CUDA kernels; null: none
  int32_t allowed = 0;          // with bias: number of experts that may be chosen, at least 1
};

}  // namespace moeserve

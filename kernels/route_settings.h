// Score, gate and selection of a router as the kernels take them.
#pragma once

#include <cstdint>

namespace moeserve {

// See engine/spec/spec.h for the meanings; this is the part that kernels need, with enums
// resolved once at load.
struct RouteSettings {
  enum class Score : uint8_t { kDot, kCosine };
  enum class Temperature : uint8_t { kNone, kDivide, kLogScale };
  enum class Gate : uint8_t { kSoftmax, kSigmoid, kSoftmaxSelected };

  int num_experts = 1;
  int input_width = 1;  // c

  Score score = Score::kDot;
  int dim = 0;  // cosine
  bool normalize_row = true;
  bool normalize_expert = true;
  float eps = 1e-12f;
  Temperature temperature = Temperature::kNone;

  Gate gate = Gate::kSoftmax;
  bool top_p = false;
  int k = 1;            // top-k: experts per row; top-p: never more than this many
  float p = 0.0f;       // top-p
  bool strict = false;  // top-p: stop at > p * Z instead of >=
  bool renormalize = false;
  float scale = 1.0f;
};

}  // namespace moeserve

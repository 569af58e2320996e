// What a step of the model reports beside its logits.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve {

// What a step reports of every routed block. Scores and inputs come with the plans.
struct StepLooks {
  bool plans = false;
  bool scores = false;  // of the router
  bool inputs = false;  // of the router

  bool any() const { return plans || scores || inputs; }
  // Whether the step has to keep rows until it ends.
  bool keeps_rows() const { return scores || inputs; }
  StepLooks operator|(StepLooks other) const {
    return {plans || other.plans, scores || other.scores, inputs || other.inputs};
  }
};

// One routed block of a step. A row is a token, or a sub-token where the block splits.
struct BlockReport {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  RoutingPlan plan;               // in host memory
  std::span<const float> scores;  // [plan.rows, E] after bias and temperature; empty: not asked for
  std::span<const float> inputs;  // [plan.rows, c] as the router saw them; empty: not asked for
};

// Valid until the next step of the backend.
struct StepReport {
  std::span<const uint8_t> failed;      // [T] 1: some row had no finite largest router score
  std::span<const TokenRoutes> routes;  // [T] work of the experts; empty without counters
  std::span<const BlockReport> blocks;  // in order (RouteLayout); empty without looks
};

struct StepOptions {
  StepLooks looks;
  RouteCounters* counters = nullptr;  // the step adds its plans; null: nothing is counted
  // Called on the caller's thread after the step was issued: a device may still be running it.
  std::function<void()> meanwhile = nullptr;
};

}  // namespace moeserve

// What a step of the model reports in addition to its logits.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "engine/spec/spec.h"
#include "engine/step/step_times.h"
#include "kernels/backend.h"

namespace moeserve {

// What a step reports for every routed block. If scores or inputs are reported, the report has the
// routing plans as well.
struct ReportContents {
  bool plans = false;
  bool scores = false;  // router scores
  bool inputs = false;  // router inputs

  bool any() const { return plans || scores || inputs; }
  // Whether the step must keep rows in device memory until it ends.
  bool keeps_rows() const { return scores || inputs; }
  ReportContents operator|(ReportContents other) const {
    return {plans || other.plans, scores || other.scores, inputs || other.inputs};
  }
};

// The report for one routed block in one step. A row is a token, or a sub-token in a block that
// splits tokens (MH-MoE).
struct BlockReport {
  int index = 0;  // in RouteLayout::blocks
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  RoutingPlan plan;  // in host memory
  // [plan.rows, E] after bias and temperature; empty if not requested
  std::span<const float> scores;
  std::span<const float> inputs;  // [plan.rows, c] as the router read them; empty if not requested
};

// The spans are valid until the backend's next step.
struct StepReport {
  // [T] 1: the largest router score of one of the token's rows was not finite
  std::span<const uint8_t> failed;
  // [T] experts' work for each token; empty without counters and with StepOptions::count_later
  std::span<const TokenRoutes> routes;
  // in the order of RouteLayout; empty if no contents were requested
  std::span<const BlockReport> blocks;
};

struct StepOptions {
  ReportContents report;
  // Counters to which the step adds its routing plans; null: nothing is counted.
  RouteCounters* counters = nullptr;
  // Whether Model::CountStep() counts the plans and returns the routes, because the phases of the
  // tokens are not known before the logits are. Only with counters.
  bool count_later = false;
  // Called on the caller's thread after the step's operations were issued. A device may still be
  // executing the step during the call.
  std::function<void()> meanwhile = nullptr;
  // Adds where the time goes; parts that are otherwise computed at once are computed one by one.
  StepTimes* times = nullptr;
};

}  // namespace moeserve

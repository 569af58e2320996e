// Limits on the rows that an expert takes, as training code that was published applies them, also
// at inference: rows over the limit are dropped. `moeserve score --capacity` reproduces it for one
// sequence at a time. The server never drops rows, because a result would depend on other requests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve {

// How the limit follows from the number of rows of a block.
struct CapacityRule {
  enum class Kind : uint8_t {
    kSwitch,    // a fixed number of rows (Switch Transformers: `expert_capacity`)
    kFraction,  // ceil(value * rows) (torchscale, NLLB-MoE: `moe_eval_capacity_token_fraction`)
    kGshard     // k * ceil(rows / E) (GShard, torchscale: fraction 0)
  };
  Kind kind = Kind::kSwitch;
  double value = 0.0;  // kSwitch: the number of rows; kFraction: in (0, 1]
  // Whether the weights of a row's kept choices are multiplied so that their sum is that of all its
  // choices (NLLB-MoE without `normalize_router_prob_before_dropping`).
  bool renormalize = false;

  // Parses "switch:64", "fraction:0.5" or "gshard", each also with ":renormalize" behind it.
  // InvalidArgument otherwise.
  static Result<CapacityRule> Parse(std::string_view text);
  std::string Text() const;  // what Parse() reads

  // Returns the largest number of rows of one expert.
  int64_t Limit(int64_t rows, int experts, int k) const;
};

// What was dropped from one routed block.
struct DroppedRows {
  uint64_t choices = 0;  // (row, expert) pairs before rows were dropped
  uint64_t dropped = 0;  // of these, the pairs that were dropped
  uint64_t rows = 0;
  uint64_t rows_without = 0;  // rows that lost all their experts
  int64_t least_limit = 0;    // smallest and largest limit of a step; 0 before the first step
  int64_t most_limit = 0;
  std::vector<uint64_t> by_expert;  // [E] dropped pairs
};

// Drops the choices over the limit, step by step. The rows of a step must be those of one sequence.
// Engine thread only; other threads may read after a request has ended.
class RowLimit {
 public:
  RowLimit(const CapacityRule& rule, const ModelSpec& spec);

  // Returns the routes of `plan`, which must be in host memory, without the dropped choices. The
  // choices of all rows are counted in order of their rank: first all rows' choices with the
  // largest weight, then those with the second largest weight, and so on; within a rank in the
  // order of the rows. A choice is kept if fewer than Limit() choices of its expert precede it,
  // kept or not. The weights stay as they are unless the rule renormalizes them. `slot` is the
  // block's index in ModelSpec::blocks.
  GivenRoutes Apply(int slot, const RoutingPlan& plan);

  // Returns what was dropped, by index in ModelSpec::blocks.
  const std::vector<DroppedRows>& dropped() const { return dropped_; }

 private:
  const CapacityRule rule_;
  std::vector<int> most_selected_;  // by block; 0 if it is not routed
  std::vector<DroppedRows> dropped_;
};

}  // namespace moeserve

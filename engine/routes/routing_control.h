// What a request may change about the routing of its own tokens.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve {

// The change as a client states it.
struct RoutingChange {
  // At most one of the two: in every routed block, the number of experts for a row, or the share
  // of top-p (at most as many experts as the model's own top-p allows, all where it has none).
  std::optional<int> top_k = {};
  std::optional<double> top_p = {};  // (0, 1]
  // `bias` is added to an expert's score before gate and selection; no value masks the expert.
  struct Expert {
    int layer = 0;
    BlockKind block = BlockKind::kFeedForward;
    int expert = 0;
    std::optional<double> bias;
  };
  std::vector<Expert> experts = {};

  bool empty() const { return !top_k && !top_p && experts.empty(); }
};

// What the operator allows requests to change.
struct RoutingControlLimits {
  bool enabled = false;
  int max_top_k = 0;  // 0: as many as there are experts
};

// A RoutingChange resolved for one model. Immutable; any thread.
class RoutingControl {
 public:
  // InvalidArgument: a value out of range, a block that is not routed, an expert that does not
  // exist or is named twice, a block without any expert left.
  static Result<RoutingControl> Create(const RoutingChange& change, const ModelSpec& spec,
                                       const RoutingControlLimits& limits);

  // Returns an allowed control whose rows choose the most experts; empty if requests may not change
  // routing or the model has no routed block.
  static std::optional<RoutingControl> Widest(const ModelSpec& spec,
                                              const RoutingControlLimits& limits);

  RouteOverride For(int layer, BlockKind block) const;
  const RoutingChange& change() const { return change_; }
  // At most 64 bytes, equal for equal changes only: prompts share cached prefixes under equal keys.
  const std::string& key() const { return key_; }

 private:
  struct Bias {
    std::vector<float> values;  // [E]
    int allowed = 0;
  };

  RoutingChange change_;
  std::map<std::pair<int, BlockKind>, Bias> biases_;
  std::string key_;
};

}  // namespace moeserve

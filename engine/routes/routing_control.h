// The routing override: what a request changes about the routing of its own tokens.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/routes/row_limit.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve {

// The override as the client states it.
struct RoutingChange {
  // At most one of `top_k` and `top_p` may be set; it applies to every routed block. `top_k` is the
  // number of experts per row. `top_p` is the probability mass for top-p selection, which selects
  // at most as many experts as the model's own top-p allows, or any number of experts if the model
  // uses top-k.
  std::optional<int> top_k = {};
  std::optional<double> top_p = {};  // (0, 1]
  // `bias` is added to the expert's score before gate and selection; nullopt masks the expert. With
  // an encoder beside the decoder, the decoder's experts are meant.
  struct Expert {
    int layer = 0;
    BlockKind block = BlockKind::kFeedForward;
    int expert = 0;
    std::optional<double> bias;
  };
  std::vector<Expert> experts = {};

  bool empty() const { return !top_k && !top_p && experts.empty(); }
};

// Limits that the operator sets on routing overrides.
struct RoutingControlLimits {
  bool enabled = false;
  int max_top_k = 0;  // 0: up to the number of experts
};

// A RoutingChange that was checked and resolved for one model. Immutable; may be used by any
// thread.
class RoutingControl {
 public:
  // Returns InvalidArgument if a value is out of range, a block is not routed, an expert does not
  // exist or is named twice, or a block has no expert left.
  static Result<RoutingControl> Create(const RoutingChange& change, const ModelSpec& spec,
                                       const RoutingControlLimits& limits);

  // Returns the allowed override whose rows select the most experts; nullopt if requests may not
  // override routing or the model has no routed block.
  static std::optional<RoutingControl> Widest(const ModelSpec& spec,
                                              const RoutingControlLimits& limits);

  // Returns an override that leaves the choice to the router and drops what `limit` drops. The
  // device must be the CPU, and the rows of each step those of one request. No API offers it.
  static RoutingControl Limited(std::shared_ptr<RowLimit> limit);

  // Returns the change of a block of this stack. Valid as long as the RoutingControl.
  RouteOverride For(Stack stack, int layer, BlockKind block) const;
  RowLimit* row_limit() const { return row_limit_.get(); }  // null: nothing is dropped
  const RoutingChange& change() const { return change_; }
  // Returns a text of at most 64 bytes that is equal only for equal changes. Prompts share cached
  // prefixes only if their keys are equal.
  const std::string& key() const { return key_; }

 private:
  struct Bias {
    std::vector<float> values;  // [E]
    int allowed = 0;
  };

  RoutingChange change_;
  std::map<std::pair<int, BlockKind>, Bias> biases_;
  std::string key_;
  std::shared_ptr<RowLimit> row_limit_;
};

}  // namespace moeserve

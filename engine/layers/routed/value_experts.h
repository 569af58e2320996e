// The experts of a routed value projection.
#pragma once

#include <memory>
#include <string>

#include "engine/layers/routed/expert_body.h"

namespace moeserve {

// AttentionSpec::value_routing: an expert is a matrix, and its result silu(W x), the values of all
// kv heads. Immutable after loading.
class ValueExperts : public ExpertBody {
 public:
  static Result<std::unique_ptr<ValueExperts>> Load(LoadContext& load, const std::string& prefix,
                                                    const AttentionSpec& spec,
                                                    const ModelSpec& model, int block);
  int64_t ResultWidth(int64_t) const override { return width_; }
  void Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
           const RowsView& results) const override;
  std::vector<LinearBank*> banks() const override { return {values_.get()}; }

 private:
  std::unique_ptr<LinearBank> values_;
  int width_ = 0;
};

}  // namespace moeserve

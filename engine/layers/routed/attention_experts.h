// The experts of a routed attention layer.
#pragma once

#include <memory>
#include <string>

#include "engine/layers/routed/expert_body.h"

namespace moeserve {

// MoA ("Mixture of Attention Heads", eq. 6 to 12): an expert is a set of query heads with its own
// output projection. Keys and values are shared by all experts; they must be in the cache before
// Run().
class AttentionExperts : public ExpertBody {
 public:
  // AttentionSpec::causal must be set. `block` is an index in ModelSpec::blocks.
  static Result<std::unique_ptr<AttentionExperts>> Load(LoadContext& load,
                                                        const std::string& prefix, int layer,
                                                        const AttentionSpec& spec,
                                                        const RopeSettings& rope,
                                                        const ModelSpec& model, int block);
  void Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
           const RowsView& results) const override;
  std::vector<LinearBank*> banks() const override { return {query_.get(), output_.get()}; }

 private:
  std::unique_ptr<LinearBank> query_;
  std::unique_ptr<LinearBank> output_;
  int heads_ = 1;      // query heads per expert; head j reads kv head j
  int selected_ = 1;   // largest number of experts that the router itself selects
  RopeSettings rope_;  // dimensions is 0 if the model has no rope
  int layer_ = 0;
  float scale_ = 1.0f, soft_cap_ = 0.0f;
  bool causal_ = true;
  int window_ = 0;
  bool chunks_ = false;
};

}  // namespace moeserve

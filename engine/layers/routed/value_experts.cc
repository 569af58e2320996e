#include "engine/layers/routed/value_experts.h"

#include <vector>

#include "base/error_text.h"

namespace moeserve {

Result<std::unique_ptr<ValueExperts>> ValueExperts::Load(LoadContext& load,
                                                         const std::string& prefix,
                                                         const AttentionSpec& spec,
                                                         const ModelSpec& model, int block) {
  auto body = std::make_unique<ValueExperts>();
  const int experts = spec.value_routing->num_experts;
  body->width_ = spec.value_width();
  std::vector<std::string> names;
  for (int e = 0; e < experts; ++e) names.push_back(Concat(prefix, ".experts.", e));
  const RoutedExperts routed = load.ExpertsOf(model, block);
  MOESERVE_ASSIGN_OR_RETURN(body->values_,
                            LoadBank(load, {model.hidden_size},
                                     std::vector<int>(static_cast<size_t>(experts), body->width_),
                                     {names, "v", std::nullopt}, false, &routed));
  return body;
}

void ValueExperts::Run(StepContext& ctx, const RoutingPlan& plan, const RowsView& rows,
                       const RowsView& results) const {
  ctx.backend.Linear({.bank = values_.get(),
                      .plan = &plan,
                      .gather = true,
                      .input = rows,
                      .output = results,
                      .activation = ActivationKind::kSilu});
}

}  // namespace moeserve

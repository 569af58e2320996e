#include "engine/statistics/measures/router_losses.h"

namespace moeserve {

RouterSummary SummarizeRouter(const BlockExpertStats& block) {
  const RouterStats& router = block.router;
  const size_t experts = router.probability_sums.size();
  RouterSummary out;
  out.rows = router.rows;
  out.probability_mean.resize(experts);
  if (router.rows == 0) return out;
  const double rows = static_cast<double>(router.rows);
  const double count = static_cast<double>(experts);
  out.entropy_mean = router.entropy_sum / rows;
  out.entropy_loss = -count * out.entropy_mean;
  out.z_loss = router.squared_logsumexp_sum / rows;
  double selections = 0.0, probabilities = 0.0;
  for (size_t e = 0; e < experts; ++e) {
    selections += static_cast<double>(router.selections[e]);
    probabilities += router.probability_sums[e];
  }
  for (size_t e = 0; e < experts; ++e) {
    const double chosen = static_cast<double>(router.selections[e]);
    const double share = chosen / rows;
    const double mean = router.probability_sums[e] / rows;
    out.probability_mean[e] = mean;
    out.balance_loss += count * share * mean;
    out.parameter_penalty += count * share * block.expert_widths[e] * mean;
    if (selections > 0.0 && probabilities > 0.0) {
      out.normalized_balance_loss +=
          count * (chosen / selections) * (router.probability_sums[e] / probabilities);
    }
  }
  return out;
}

}  // namespace moeserve

#include "server/metrics/expert_balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moeserve::server {

ExpertBalance MeasureBalance(const std::vector<double>& selections) {
  ExpertBalance out;
  const double total = std::accumulate(selections.begin(), selections.end(), 0.0);
  if (selections.empty() || total <= 0.0) {
    out.unused = static_cast<int>(selections.size());
    return out;
  }
  const double max = *std::max_element(selections.begin(), selections.end());
  const double count = static_cast<double>(selections.size());
  double entropy = 0.0;
  for (const double value : selections) {
    if (value <= 0.0) {
      ++out.unused;
    } else {
      entropy -= value / total * std::log(value / total);
    }
  }
  out.balance = total / count / max;
  out.entropy = selections.size() > 1 ? std::min(1.0, entropy / std::log(count)) : 1.0;
  return out;
}

}  // namespace moeserve::server

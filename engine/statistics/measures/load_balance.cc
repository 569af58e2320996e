#include "engine/statistics/measures/load_balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moeserve {
namespace {

std::vector<double> Divided(const std::vector<uint64_t>& counts, double by) {
  std::vector<double> out(counts.size(), 0.0);
  if (by <= 0.0) return out;
  std::transform(counts.begin(), counts.end(), out.begin(),
                 [by](uint64_t n) { return static_cast<double>(n) / by; });
  return out;
}

}  // namespace

std::vector<double> SelectionRatios(const BlockExpertStats& block) {
  return Divided(block.selections, static_cast<double>(block.total_tokens()));
}

std::vector<double> SelectionRatiosOfChoices(const BlockExpertStats& block) {
  return Divided(block.selections, static_cast<double>(block.total_tokens()) * block.split_heads *
                                       block.max_selected);
}

std::vector<double> LoadShares(const BlockExpertStats& block) {
  double sum = 0.0;
  for (const uint64_t n : block.selections) sum += static_cast<double>(n);
  return Divided(block.selections, sum);
}

std::vector<int> ExpertsByLoad(const BlockExpertStats& block) {
  std::vector<int> order(block.selections.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return block.selections[a] > block.selections[b]; });
  return order;
}

int ActivatedExperts(const BlockExpertStats& block, double threshold) {
  const std::vector<double> ratios = SelectionRatios(block);
  return static_cast<int>(
      std::count_if(ratios.begin(), ratios.end(), [&](double r) { return r > threshold; }));
}

LoadShape MeasureLoad(const std::vector<double>& selections) {
  LoadShape shape;
  const double total = std::accumulate(selections.begin(), selections.end(), 0.0);
  if (selections.empty() || total <= 0.0) {
    shape.unused = static_cast<int>(selections.size());
    return shape;
  }
  const double max = *std::max_element(selections.begin(), selections.end());
  const double count = static_cast<double>(selections.size());
  double entropy = 0.0;
  for (const double value : selections) {
    if (value <= 0.0) {
      ++shape.unused;
    } else {
      entropy -= value / total * std::log(value / total);
    }
  }
  shape.balance = total / count / max;
  shape.entropy = selections.size() > 1 ? std::min(1.0, entropy / std::log(count)) : 1.0;
  return shape;
}

}  // namespace moeserve

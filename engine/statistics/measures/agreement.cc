#include "engine/statistics/measures/agreement.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace moeserve {

Fluctuation RoutingFluctuation(const BlockRoutes& a, const BlockRoutes& b) {
  MOESERVE_CHECK(a.rows() == b.rows(), "routes of the same rows");
  Fluctuation out;
  out.rows = a.rows();
  uint64_t top1 = 0, sets = 0;
  for (size_t r = 0; r < a.rows(); ++r) {
    top1 += a.top1[r] != b.top1[r];
    sets += !std::ranges::equal(a.ExpertsOf(r), b.ExpertsOf(r));
  }
  if (out.rows > 0) {
    out.top1 = static_cast<double>(top1) / static_cast<double>(out.rows);
    out.sets = static_cast<double>(sets) / static_cast<double>(out.rows);
  }
  return out;
}

double Correlation(std::span<const double> a, std::span<const double> b) {
  MOESERVE_CHECK(a.size() == b.size(), "loads of the same experts");
  const double n = static_cast<double>(a.size());
  double mean_a = 0.0, mean_b = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    mean_a += a[i];
    mean_b += b[i];
  }
  mean_a /= n;
  mean_b /= n;
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean_a) * (b[i] - mean_b);
    aa += (a[i] - mean_a) * (a[i] - mean_a);
    bb += (b[i] - mean_b) * (b[i] - mean_b);
  }
  if (!(aa > 0.0) || !(bb > 0.0)) return std::numeric_limits<double>::quiet_NaN();
  return std::clamp(ab / std::sqrt(aa) / std::sqrt(bb), -1.0, 1.0);
}

double InterRunConsistency(const std::vector<std::vector<double>>& loads) {
  double sum = 0.0;
  for (const auto& a : loads) {
    for (const auto& b : loads) sum += Correlation(a, b);
  }
  return sum / static_cast<double>(loads.size() * loads.size());
}

}  // namespace moeserve

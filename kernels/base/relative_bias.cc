#include "kernels/base/relative_bias.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace moeserve {

std::vector<int> BucketsOfDistances(const RelativeBias& bias, int64_t positions) {
  const int used = bias.used_buckets();
  const int exact = bias.exact_buckets();
  MOESERVE_CHECK(exact >= 1 && bias.max_distance > exact, "buckets of relative positions");
  const auto whole = static_cast<float>(std::log(static_cast<double>(bias.max_distance) / exact));
  std::vector<int> buckets;
  for (int64_t distance = 0; distance < positions; ++distance) {
    int bucket = static_cast<int>(std::min<int64_t>(distance, exact));
    if (distance >= exact) {
      const float ratio = static_cast<float>(distance) / static_cast<float>(exact);
      // The logarithm of f32, rounded once, whatever the precision of a library's logf().
      const auto part = static_cast<float>(std::log(static_cast<double>(ratio)));
      const float steps = part / whole * static_cast<float>(used - exact);
      // Distances far above max_distance end the loop below before `steps` could overflow an int.
      bucket = std::min(exact + static_cast<int>(steps), used - 1);
    }
    buckets.push_back(bucket);
    if (bucket == used - 1) break;
  }
  return buckets;
}

}  // namespace moeserve

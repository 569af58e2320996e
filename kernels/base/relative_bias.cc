#include "kernels/base/relative_bias.h"

#include <cmath>

#include "base/check.h"

namespace moeserve {

namespace {

// Returns the bucket of a distance of at least 0. As in the original code, the logarithms are those
// of f32: rounded once, whatever the precision of a library's logf().
int BucketBefore(const RelativeBias& bias, int64_t distance) {
  const int used = bias.used_buckets();
  const int exact = bias.exact_buckets();
  MOESERVE_CHECK(exact >= 1 && bias.max_distance > exact, "buckets of relative positions");
  if (distance < exact) return static_cast<int>(distance);
  const auto whole = static_cast<float>(std::log(static_cast<double>(bias.max_distance) / exact));
  const float ratio = static_cast<float>(distance) / static_cast<float>(exact);
  const auto part = static_cast<float>(std::log(static_cast<double>(ratio)));
  const float steps = part / whole * static_cast<float>(used - exact);
  // Far above max_distance, `steps` could overflow an int.
  const float most = static_cast<float>(used - 1 - exact);
  return steps < most ? exact + static_cast<int>(steps) : used - 1;
}

}  // namespace

int BucketOfDistance(const RelativeBias& bias, int64_t distance) {
  if (distance >= 0) return BucketBefore(bias, distance);
  return bias.bidirectional ? bias.used_buckets() + BucketBefore(bias, -distance) : 0;
}

std::vector<int> BucketsOfDistances(const RelativeBias& bias, int64_t positions) {
  std::vector<int> buckets;
  for (int64_t distance = 0; distance < positions; ++distance) {
    buckets.push_back(BucketBefore(bias, distance));
    if (buckets.back() == bias.used_buckets() - 1) break;
  }
  return buckets;
}

std::vector<int> BucketsOfSignedDistances(const RelativeBias& bias, int64_t positions) {
  const auto size = static_cast<int64_t>(BucketsOfDistances(bias, positions).size());
  std::vector<int> buckets;
  for (int64_t n = 1 - size; n < size; ++n) buckets.push_back(BucketOfDistance(bias, n));
  return buckets;
}

}  // namespace moeserve

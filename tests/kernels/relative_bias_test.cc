// The buckets of relative positions against values of T5's original formula.

#include "kernels/base/relative_bias.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace moeserve {
namespace {

// Returns the first distance of each bucket.
std::vector<int> FirstDistances(const RelativeBias& bias, int64_t positions) {
  std::vector<int> first;
  const std::vector<int> buckets = BucketsOfDistances(bias, positions);
  for (size_t distance = 0; distance < buckets.size(); ++distance) {
    if (distance > 0 && buckets[distance] == buckets[distance - 1]) continue;
    EXPECT_EQ(buckets[distance], static_cast<int>(first.size())) << distance;
    first.push_back(static_cast<int>(distance));
  }
  return first;
}

// The expected values were computed with PyTorch.
TEST(RelativeBiasTest, BucketsAreThoseOfTheOriginalCode) {
  EXPECT_EQ(FirstDistances({.buckets = 32, .max_distance = 128, .bidirectional = true}, 4096),
            (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91}));
  EXPECT_EQ(FirstDistances({.buckets = 32, .max_distance = 128}, 4096),
            (std::vector<int>{0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                              16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113}));
  EXPECT_EQ(FirstDistances({.buckets = 14, .max_distance = 20, .bidirectional = true}, 4096),
            (std::vector<int>{0, 1, 2, 3, 5, 8, 13}));
}

// Away from the limits of buckets, the arithmetic's precision does not matter.
TEST(RelativeBiasTest, BucketsFollowTheLogarithm) {
  for (const int buckets : {2, 3, 8, 31, 64, 500}) {
    for (const int max_distance : {300, 1000, 30000}) {
      const RelativeBias bias{.buckets = buckets, .max_distance = max_distance};
      const std::vector<int> all = BucketsOfDistances(bias, 1 << 20);
      const double exact = bias.exact_buckets(), large = buckets - exact;
      ASSERT_LE(all.size(), static_cast<size_t>(max_distance) + 1);
      EXPECT_EQ(all.back(), buckets - 1);
      for (size_t n = 0; n < all.size(); ++n) {
        const auto distance = static_cast<double>(n);
        if (distance < exact) {
          ASSERT_EQ(all[n], static_cast<int>(n));
          continue;
        }
        const double steps = std::log(distance / exact) / std::log(max_distance / exact) * large;
        if (std::abs(steps - std::round(steps)) < 1e-3) continue;
        ASSERT_EQ(all[n], static_cast<int>(exact + std::floor(steps))) << n;
      }
    }
  }
}

// Distances that do not occur, and those after the first one of the last bucket, are left out.
TEST(RelativeBiasTest, ListsEndWhereNothingChanges) {
  const RelativeBias bias{.buckets = 32, .max_distance = 128};
  EXPECT_EQ(BucketsOfDistances(bias, 1 << 24).size(), 114u);
  EXPECT_EQ(BucketsOfDistances(bias, 114).size(), 114u);
  EXPECT_EQ(BucketsOfDistances(bias, 50).size(), 50u);
  EXPECT_EQ(BucketsOfDistances(bias, 1), std::vector<int>{0});
}

}  // namespace
}  // namespace moeserve

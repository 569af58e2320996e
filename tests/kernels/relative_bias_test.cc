// The buckets of relative positions against values of T5's original formula.

#include "kernels/base/relative_bias.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>
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

// The buckets of keys after the query, with the values of T5's original formula: for a distance of
// -n they are those of n in the second half, and without that half they are 0.
TEST(RelativeBiasTest, SignedDistancesHaveTheBucketsOfBothHalves) {
  const RelativeBias both{.buckets = 32, .max_distance = 128, .bidirectional = true};
  const std::vector<std::pair<int, int>> expected = {
      {0, 0},    {1, 1},    {7, 7},     {8, 8},    {11, 8},    {12, 9},
      {90, 14},  {91, 15},  {5000, 15}, {-1, 17},  {-7, 23},   {-8, 24},
      {-11, 24}, {-12, 25}, {-90, 30},  {-91, 31}, {-5000, 31}};
  for (const auto& [distance, bucket] : expected) {
    EXPECT_EQ(BucketOfDistance(both, distance), bucket) << distance;
  }
  const RelativeBias causal{.buckets = 32, .max_distance = 128};
  EXPECT_EQ(BucketOfDistance(causal, 15), 15);
  EXPECT_EQ(BucketOfDistance(causal, 112), 30);
  EXPECT_EQ(BucketOfDistance(causal, 113), 31);
  EXPECT_EQ(BucketOfDistance(causal, int64_t{1} << 60), 31);
  EXPECT_EQ(BucketOfDistance(causal, -1), 0);
  EXPECT_EQ(BucketOfDistance(causal, -500), 0);
  // An odd number of buckets: both halves have the smaller half.
  const RelativeBias odd{.buckets = 15, .max_distance = 20, .bidirectional = true};
  EXPECT_EQ(BucketOfDistance(odd, 0), 0);
  EXPECT_EQ(BucketOfDistance(odd, 100), 6);
  EXPECT_EQ(BucketOfDistance(odd, -1), 8);
  EXPECT_EQ(BucketOfDistance(odd, -100), 13);
}

TEST(RelativeBiasTest, SignedListsAreSymmetric) {
  for (const bool bidirectional : {false, true}) {
    const RelativeBias bias{.buckets = 32, .max_distance = 128, .bidirectional = bidirectional};
    for (const int64_t positions : {1, 2, 50, 4096}) {
      const auto size = static_cast<int64_t>(BucketsOfDistances(bias, positions).size());
      const std::vector<int> buckets = BucketsOfSignedDistances(bias, positions);
      ASSERT_EQ(std::ssize(buckets), 2 * size - 1);
      for (int64_t n = 1 - size; n < size; ++n) {
        ASSERT_EQ(buckets[static_cast<size_t>(n + size - 1)], BucketOfDistance(bias, n)) << n;
      }
      if (positions < 4096) continue;
      // All larger distances have the buckets of the first and of the last element.
      for (const int64_t n : {size, int64_t{4095}}) {
        EXPECT_EQ(buckets.front(), BucketOfDistance(bias, -n));
        EXPECT_EQ(buckets.back(), BucketOfDistance(bias, n));
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

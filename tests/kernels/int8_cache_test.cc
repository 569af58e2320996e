// Rounding of keys and values to int8 for the KV cache.

#include "kernels/base/int8_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/base/dtype.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

struct RoundedHead {
  std::vector<int> integers;
  float scale;
};

RoundedHead RoundHead(const std::vector<float>& head) {
  uint32_t largest = 0;
  for (const float x : head) largest = std::max(largest, MagnitudeBits(x));
  const Int8Scale scale = CacheScaleOf(largest);
  RoundedHead rounded{{}, scale.scale};
  for (const float x : head) rounded.integers.push_back(RoundToInt8(x, scale));
  return rounded;
}

// The definition: the f32 product of an element and 127 / largest is rounded to the nearest
// integer, ties to even, and the scale is the f32 quotient largest / 127.
TEST(Int8CacheTest, RoundsByTheDefinition) {
  Random random(1);
  int largest_integers = 0;
  for (const int n : {1, 16, 80, 128, 512}) {
    for (const double size : {1.1e-36, 1e-30, 1e-3, 1.0, 7.0, 1e30}) {
      std::vector<float> head = random.Normals(n, size);
      if (size == 7.0) {
        // 127 / largest is 0.5 here, so there are many ties.
        for (float& x : head) x = static_cast<float>(random.Below(255) - 127);
        head[0] = -254.0f;
      }
      float largest = 0.0f;
      for (const float x : head) largest = std::max(largest, std::abs(x));
      if (largest < 1e-36f) continue;
      const float inverse = 127.0f / largest;
      const RoundedHead rounded = RoundHead(head);
      EXPECT_EQ(BitsFromF32(rounded.scale), BitsFromF32(largest / 127.0f));
      for (int i = 0; i < n; ++i) {
        const float product = head[static_cast<size_t>(i)] * inverse;
        EXPECT_EQ(rounded.integers[static_cast<size_t>(i)], std::nearbyint(product)) << product;
        largest_integers += std::abs(rounded.integers[static_cast<size_t>(i)]) == 127;
      }
    }
  }
  EXPECT_GE(largest_integers, 25);
}

TEST(Int8CacheTest, TinyAndNonFiniteHeadsBecomeZeros) {
  for (const float tiny : {0.0f, -0.0f, 1e-45f, -9.9e-37f}) {
    const RoundedHead rounded = RoundHead({tiny, 0.0f, 1e-40f});
    EXPECT_EQ(BitsFromF32(rounded.scale), 0u) << tiny;
    EXPECT_EQ(rounded.integers, std::vector<int>(3, 0));
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad :
       {infinity, -infinity, F32FromBits(0x7fc00000u), F32FromBits(0xff800001u)}) {
    const RoundedHead rounded = RoundHead({1.0f, bad, -3e38f});
    EXPECT_EQ(BitsFromF32(rounded.scale), 0x7fc00000u) << bad;
    EXPECT_EQ(rounded.integers, std::vector<int>(3, 0));
  }
  const RoundedHead huge = RoundHead({std::numeric_limits<float>::max(), -1e38f});
  EXPECT_EQ(huge.integers, (std::vector<int>{127, -37}));
}

}  // namespace
}  // namespace moeserve::testing

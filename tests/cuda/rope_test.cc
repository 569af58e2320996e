// Rotary positions on the device compared with double arithmetic.

#include "kernels/cuda/positions/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cuda/positions/rope_tables.h"
#include "tests/cuda/device_array.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"

namespace moeserve::cuda {
namespace {

using testing::Random;

TEST(CudaRopeTest, TurnsPairs) {
  Random random(7);
  for (const bool interleaved : {false, true}) {
    for (const int turned : {8, 12}) {
      const int head_dim = 12, heads = 43, tokens = 4, stride = heads * head_dim + 5;
      const std::vector<int32_t> position = {0, 1, 99999, 8000}, sequence = {0, 3, -1, 1};
      const std::vector<int32_t> token_of = {3, 2, 1, 1, 0, 3, 3};
      for (const bool routed : {false, true}) {
        const int rows = routed ? 7 : tokens, valid = routed ? 5 : tokens;
        std::vector<float> x = random.Normals(int64_t{rows} * stride);
        DeviceArray<int32_t> d_position(position), d_sequence(sequence), d_token_of(token_of),
            d_valid(std::vector<int32_t>{valid});
        DeviceArray<float> d_x(x);
        RopeLaunch a;
        a.head_dim = head_dim;
        a.dimensions = turned;
        a.interleaved = interleaved;
        a.step = {tokens, d_position.data(), d_sequence.data(), nullptr, 0, 0};
        RopeTables tables;
        const RopeSettings settings{.head_dim = head_dim, .dimensions = turned};
        ASSERT_TRUE(tables.Reserve(settings, tokens, nullptr).ok());
        a.angles = tables.Angles(settings, a.step, nullptr);
        a.token_of_row = routed ? d_token_of.data() : nullptr;
        a.valid_rows = routed ? d_valid.data() : nullptr;
        a.rows = d_x.data();
        a.num_rows = rows;
        a.heads = heads;
        a.stride = stride;
        LaunchRope(a, nullptr);
        const std::vector<float> y = d_x.Read();
        for (int r = 0; r < rows; ++r) {
          const int t = routed ? token_of[r] : r;
          std::vector<double> expected(x.begin() + r * stride, x.begin() + (r + 1) * stride);
          const bool turns = r < valid && sequence[t] >= 0;
          for (int h = 0; turns && h < heads; ++h) {
            for (int i = 0; i < turned / 2; ++i) {
              const double angle = position[t] * std::pow(10000.0, -2.0 * i / turned);
              const int first = h * head_dim + (interleaved ? 2 * i : i);
              const int second = first + (interleaved ? 1 : turned / 2);
              const double u = x[r * stride + first], v = x[r * stride + second];
              expected[first] = u * std::cos(angle) - v * std::sin(angle);
              expected[second] = v * std::cos(angle) + u * std::sin(angle);
            }
          }
          const std::vector<double> actual(y.begin() + r * stride, y.begin() + (r + 1) * stride);
          if (!turns) {
            ASSERT_EQ(actual, expected);
            continue;
          }
          ASSERT_TRUE(testing::RowNear(actual, expected, 1e-6)) << "row " << r;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moeserve::cuda

// Pooling of rows: the bits of plain loops on every device.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/kinds.h"
#include "tests/support/backends.h"
#include "tests/support/device_rows.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

class PoolingTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }
  std::unique_ptr<Backend> backend_;
};

// Ranges of one row, of adjacent and of overlapping rows, wider and narrower than vectors.
TEST_P(PoolingTest, RangesHaveTheBitsOfPlainLoops) {
  Random random(21);
  const std::vector<RowRange> ranges = {{0, 1}, {1, 6}, {6, 40}, {2, 4}, {39, 40}, {0, 40}};
  const std::vector<int32_t> zeros(40);
  backend_->BeginStep(
      {.token_ids = zeros, .position = zeros, .sequence = zeros, .pool_ranges = ranges}, nullptr,
      true);
  for (const int width : {1, 3, 8, 24, 33, 128, 700}) {
    std::vector<float> x = random.Normals(int64_t{40} * width, 3.0);
    x[0] = -0.0f;
    x[int64_t{3} * width] = std::numeric_limits<float>::quiet_NaN();
    x[int64_t{7} * width] = x[int64_t{8} * width] = std::numeric_limits<float>::infinity();
    const DeviceRows input = MakeRows(*backend_, 40, width, width + 5, DType::kF32, &x);
    for (const PoolKind kind : AllKinds<PoolKind>()) {
      const DeviceRows output =
          MakeRows(*backend_, std::ssize(ranges), width, width + 3, DType::kF32, nullptr);
      backend_->PoolRows({.kind = kind, .input = input.view, .output = output.view});
      const double behind = RowOf(*backend_, output.view, 0, width + 1).back();
      ASSERT_TRUE(std::isnan(behind)) << "wrote behind a row";
      const std::vector<float> results = HostRows(*backend_, output.view);
      for (size_t p = 0; p < ranges.size(); ++p) {
        for (int i = 0; i < width; ++i) {
          float expected = x[int64_t{ranges[p].begin} * width + i];
          for (int r = ranges[p].begin + 1; r < ranges[p].end; ++r) {
            const float v = x[int64_t{r} * width + i];
            if (kind == PoolKind::kMean) {
              expected += v;
            } else if (!std::isnan(expected) && (std::isnan(v) || v > expected)) {
              expected = v;
            }
          }
          if (kind == PoolKind::kMean) {
            expected /= static_cast<float>(ranges[p].end - ranges[p].begin);
          }
          const float actual = results[p * static_cast<size_t>(width) + i];
          ASSERT_TRUE(std::isnan(expected) ? std::isnan(actual)
                                           : BitsFromF32(expected) == BitsFromF32(actual))
              << KindName(kind) << ", width " << width << ", range " << p << ", column " << i
              << ": " << actual << " instead of " << expected;
        }
      }
    }
  }
}

// The rows of a range may be many, and the ranges may be divided among threads.
TEST_P(PoolingTest, ManyRangesAndLongOnes) {
  Random random(22);
  constexpr int kWidth = 64, kRows = 3000;
  std::vector<RowRange> ranges = {{0, kRows}};
  for (int r = 0; r + 9 <= kRows; r += 9) ranges.push_back({r, r + 9});
  const std::vector<int32_t> zeros(kRows);
  backend_->BeginStep(
      {.token_ids = zeros, .position = zeros, .sequence = zeros, .pool_ranges = ranges}, nullptr,
      false);
  const std::vector<float> x = random.Normals(int64_t{kRows} * kWidth);
  const DeviceRows input = MakeRows(*backend_, x, kWidth);
  const DeviceRows output =
      MakeRows(*backend_, std::ssize(ranges), kWidth, kWidth, DType::kF32, nullptr);
  backend_->PoolRows({.kind = PoolKind::kMean, .input = input.view, .output = output.view});
  const std::vector<float> results = HostRows(*backend_, output.view);
  for (size_t p = 0; p < ranges.size(); ++p) {
    for (int i = 0; i < kWidth; ++i) {
      float sum = x[int64_t{ranges[p].begin} * kWidth + i];
      for (int r = ranges[p].begin + 1; r < ranges[p].end; ++r) sum += x[int64_t{r} * kWidth + i];
      ASSERT_EQ(results[p * kWidth + i], sum / static_cast<float>(ranges[p].end - ranges[p].begin));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PoolingTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing

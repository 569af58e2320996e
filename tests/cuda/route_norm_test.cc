// A router that computes the norm of its rows first must have the bits of the two launches that it
// replaces: in the residual stream, the normed rows and the plan.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/rows/rows.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/cuda/route_support.h"

namespace moeserve::cuda {
namespace {

struct NormCase {
  int experts = 8;
  int width = 64;
  int rows = 1;
  bool bf16 = true;
  bool layer = false;
  bool bias = false;
  bool sum = false;       // the branch is a weighted sum of experts' results
  bool residual = false;  // of the sum
  int gap = 0;            // unused elements between rows
};

class NormScene {
 public:
  NormScene(const NormCase& c, uint64_t seed) : c_(c), random_(seed) {
    route_.settings.num_experts = c.experts;
    route_.settings.input_width = c.width;
    route_.settings.k = std::min(c.experts, 3);
    SetScores(route_, 0, random_, DType::kF32, false);
    router_ = std::move(CudaRouter::Create(route_.settings, route_.tensors)).value();
    const int64_t count = int64_t{c.rows} * c.width;
    x_ = random_.Normals(count, 3.0);
    branch_ = random_.Normals(count);
    before_ = random_.Normals(count);
    results_ = random_.Normals(2 * count);
    scale_ = random_.Normals(c.width);
    shift_ = random_.Normals(c.width);
    bias_ = random_.Normals(c.width);
    // Row r has r % 3 results.
    std::vector<int32_t> offsets = {0};
    for (int r = 0; r < c.rows; ++r) offsets.push_back(offsets.back() + r % 3);
    std::vector<int32_t> of_row;
    for (int i = 0; i < offsets.back(); ++i) of_row.push_back((i * 5 + 1) % (2 * c.rows));
    offsets_ = std::make_unique<DeviceArray<int32_t>>(offsets);
    of_row_ = std::make_unique<DeviceArray<int32_t>>(of_row);
    weights_ = std::make_unique<DeviceArray<float>>(random_.Normals(2 * c.rows));
  }

  struct Outcome {
    std::vector<uint32_t> x;
    std::vector<uint8_t> rows;
    std::optional<HostPlan> plan;  // none if the norm is not possible in a router's launch
  };

  // cluster_blocks < 0: by two launches.
  Outcome Run(int cluster_blocks) {
    const int64_t stride = c_.width + c_.gap;
    const DeviceRows x(x_, c_.width, stride, false), branch(branch_, c_.width, stride, false);
    // The normed rows may replace the rows of the residual.
    const DeviceRows rows(before_, c_.width, stride, c_.bf16);
    const DeviceRows results(results_, c_.width, stride, c_.bf16);
    const DeviceArray<float> scale(scale_), shift(shift_), bias(bias_);
    const DeviceArray<int32_t> group(std::vector<int32_t>{0, c_.width});
    const RoutingPlan plan{.rows = c_.rows,
                           .weight_of_assignment = weights_->data(),
                           .row_offsets = offsets_->data(),
                           .assignments_of_row = of_row_->data()};
    const RowsView before = rows.view(), branch_rows = branch.view();
    const CombineArgs sum{.plan = &plan,
                          .results = results.view(),
                          .residual = c_.residual ? &before : nullptr,
                          .output = branch_rows};
    const NormLaunch norm{.shape = {.layer = c_.layer, .eps = 1e-5f},
                          .scales = scale.data(),
                          .shifts = c_.layer ? shift.data() : nullptr,
                          .group_begin = group.data(),
                          .width = c_.width,
                          .input = x.view(),
                          .output = rows.view(),
                          .branch = branch_rows,
                          .sum = c_.sum ? &sum : nullptr,
                          .bias = c_.bias ? bias.data() : nullptr,
                          .scale = 0.7f};
    const int k = route_.settings.k;
    PlanMemory memory = PlanMemory::Create(c_.rows, k, c_.experts).value();
    RouteScratch scratch =
        RouteScratch::Create(c_.rows, k, c_.experts, router_->tables().columns).value();
    RouteLaunch launch{.router = router_.get(),
                       .input = rows.view(),
                       .k_max = k,
                       .plan = &memory,
                       .scratch = &scratch};
    if (cluster_blocks >= 0) {
      launch.norm = &norm;
      launch.variant.cluster_blocks = cluster_blocks;
      if (!CanRouteNorm(launch)) return {};
    } else {
      LaunchNorm(norm, nullptr);
    }
    Outcome o;
    o.plan = FromCuda(LaunchRoute(launch, nullptr));
    o.x = FromDevice(static_cast<const uint32_t*>(x.view().data),
                     static_cast<size_t>(c_.rows * stride));
    o.rows = FromDevice(static_cast<const uint8_t*>(rows.view().data),
                        static_cast<size_t>(c_.rows * stride) * (c_.bf16 ? 2 : 4));
    return o;
  }

 private:
  NormCase c_;
  Random random_;
  RouteCase route_;
  std::unique_ptr<CudaRouter> router_;
  std::vector<float> x_, branch_, before_, results_, scale_, shift_, bias_;
  std::unique_ptr<DeviceArray<int32_t>> offsets_, of_row_;
  std::unique_ptr<DeviceArray<float>> weights_;
};

void ExpectSameOutcome(const NormCase& c, uint64_t seed) {
  SCOPED_TRACE("case " + std::to_string(seed) + ", width " + std::to_string(c.width) + ", rows " +
               std::to_string(c.rows));
  NormScene scene(c, seed);
  const NormScene::Outcome expected = scene.Run(-1);
  for (const int blocks : {0, 8, 16}) {
    const NormScene::Outcome actual = scene.Run(blocks);
    if (!actual.plan.has_value()) {
      ASSERT_FALSE(HasClusters()) << "blocks " << blocks;
      continue;
    }
    ASSERT_TRUE(actual.x == expected.x) << "blocks " << blocks;
    ASSERT_TRUE(actual.rows == expected.rows) << "blocks " << blocks;
    ASSERT_NO_FATAL_FAILURE(ExpectSame(*actual.plan, *expected.plan));
  }
}

const NormCase kNormCases[] = {
    {.experts = 8, .width = 64, .rows = 1},
    {.experts = 8, .width = 512, .rows = 8, .bias = true, .sum = true},
    {.experts = 5, .width = 33, .rows = 3, .layer = true, .gap = 4},
    {.experts = 60, .width = 513, .rows = 2, .bf16 = false, .bias = true, .gap = 3},
    {.experts = 64, .width = 2048, .rows = 8, .sum = true, .residual = true},
    {.experts = 8, .width = 4096, .rows = 1, .layer = true, .bias = true, .gap = 16},
    {.experts = 8, .width = 4104, .rows = 3, .sum = true},
    {.experts = 4, .width = 5003, .rows = 2, .bf16 = false, .sum = true, .residual = true},
    {.experts = 128, .width = 768, .rows = 7, .bf16 = false, .sum = true},
};

TEST(CudaRouteNormTest, HasTheBitsOfTwoLaunches) {
  uint64_t seed = 1;
  for (const NormCase& c : kNormCases) ASSERT_NO_FATAL_FAILURE(ExpectSameOutcome(c, seed++));
}

TEST(CudaRouteNormTest, EveryOrder) {
  InEveryOrder([] {
    uint64_t seed = 20;
    for (const NormCase& c : kNormCases) {
      if (c.width == 64 || c.width == 512 || c.width == 513 || c.width == 768) {
        ASSERT_NO_FATAL_FAILURE(ExpectSameOutcome(c, seed++));
      }
    }
  });
}

TEST(CudaRouteNormTest, MoreRowsTakeTwoLaunches) {
  if (!HasClusters()) GTEST_SKIP();
  EXPECT_TRUE(NormScene({.rows = kMostRoutedNorms}, 1).Run(0).plan.has_value());
  EXPECT_FALSE(NormScene({.rows = kMostRoutedNorms + 1}, 1).Run(0).plan.has_value());
  // The weights do not fit.
  EXPECT_FALSE(NormScene({.experts = 256, .width = 8192}, 1).Run(0).plan.has_value());
  EXPECT_FALSE(NormScene({.experts = 300}, 1).Run(0).plan.has_value());
}

}  // namespace
}  // namespace moeserve::cuda

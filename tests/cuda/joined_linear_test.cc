// A dense layer that computes the norm of its rows first must have the bits of the two launches
// that it replaces: in the residual stream, the normed rows and the outputs.

#include "kernels/cuda/joined/joined_linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/rows/rows.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/cuda/linear_case.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

struct JoinCase {
  int width = 64;
  int outputs = 64;
  int rows = 1;
  bool layer = false;
  bool bias = false;      // of the sum and of the layer
  bool sum = false;       // the branch is a weighted sum of experts' results
  bool residual = false;  // of the sum; its rows are replaced by the normed rows
  bool bf16 = false;      // the outputs
  int gap = 0;            // unused elements between rows, a multiple of 8
};

// The bytes of the residual stream, the normed rows and the outputs, and of what is around them.
using Bytes = std::tuple<std::vector<char>, std::vector<char>, std::vector<char>>;

class JoinScene {
 public:
  JoinScene(const JoinCase& c, uint64_t seed) : c_(c), random_(seed) {
    LinearBankShape shape{{c.width}, {c.outputs}, false, c.bias, DType::kBF16};
    bank_ = std::move(cuda::CudaLinearBank::Create(shape)).value();
    bank_->LoadWeight(
        0, LinearBank::Half::kMain, 0,
        MakeTensor(random_.Normals(int64_t{c.outputs} * c.width, 0.1), {c.outputs, c.width}));
    if (c.bias) {
      bank_->LoadBias(0, LinearBank::Half::kMain, 0,
                      MakeTensor(random_.Normals(c.outputs), {c.outputs}));
    }
    const int64_t count = int64_t{c.rows} * c.width;
    x_ = random_.Normals(count, 3.0);
    branch_ = random_.Normals(count);
    before_ = random_.Normals(count);
    results_ = random_.Normals(2 * count);
    scale_ = std::make_unique<cuda::DeviceArray<float>>(random_.Normals(c.width));
    shift_ = std::make_unique<cuda::DeviceArray<float>>(random_.Normals(c.width));
    bias_ = std::make_unique<cuda::DeviceArray<float>>(random_.Normals(c.width));
    group_ = std::make_unique<cuda::DeviceArray<int32_t>>(std::vector<int32_t>{0, c.width});
    // Row r has (r + 2) % 4 results.
    std::vector<int32_t> offsets = {0}, of_row;
    for (int r = 0; r < c.rows; ++r) offsets.push_back(offsets.back() + (r + 2) % 4);
    for (int i = 0; i < offsets.back(); ++i) of_row.push_back((i * 5 + 1) % (2 * c.rows));
    offsets_ = std::make_unique<cuda::DeviceArray<int32_t>>(offsets);
    of_row_ = std::make_unique<cuda::DeviceArray<int32_t>>(of_row);
    weights_ = std::make_unique<cuda::DeviceArray<float>>(random_.Normals(2 * c.rows));
  }

  // `form` none: by two launches. Returns nothing if the form is not possible.
  std::optional<Bytes> Run(std::optional<cuda::JoinedForm> form, int times = 1) {
    const int64_t stride = c_.width + c_.gap;
    DeviceRows x(c_.rows, c_.width, stride, DType::kF32, x_);
    DeviceRows rows(c_.rows, c_.width, stride, DType::kBF16, before_);
    DeviceRows outputs(c_.rows, c_.outputs, c_.outputs + c_.gap + 3,
                       c_.bf16 ? DType::kBF16 : DType::kF32);
    const DeviceRows branch(c_.rows, c_.width, stride, DType::kF32,
                            c_.sum ? std::vector<float>() : branch_);
    const DeviceRows results(2 * c_.rows, c_.width, stride, DType::kBF16, results_);
    const RoutingPlan plan{.rows = c_.rows,
                           .weight_of_assignment = weights_->data(),
                           .row_offsets = offsets_->data(),
                           .assignments_of_row = of_row_->data()};
    const RowsView before = rows.view();
    const CombineArgs sum{.plan = &plan,
                          .results = results.view(),
                          .residual = c_.residual ? &before : nullptr,
                          .output = branch.view()};
    const cuda::NormLaunch norm{.shape = {.layer = c_.layer, .eps = 1e-5f},
                                .scales = scale_->data(),
                                .shifts = c_.layer ? shift_->data() : nullptr,
                                .group_begin = group_->data(),
                                .width = c_.width,
                                .input = x.view(),
                                .output = rows.view(),
                                .branch = branch.view(),
                                .sum = c_.sum ? &sum : nullptr,
                                .bias = c_.bias ? bias_->data() : nullptr,
                                .scale = 0.7f};
    const LinearArgs linear{.bank = bank_.get(), .input = rows.view(), .output = outputs.view()};
    const cuda::JoinedLinear joined{
        .linear = linear, .norm = &norm, .form = form.value_or(cuda::JoinedForm::kAuto)};
    if (form.has_value() && !cuda::CanJoin(joined, nullptr)) return std::nullopt;
    for (int i = 0; i < times; ++i) {
      if (form.has_value()) {
        cuda::LaunchJoinedLinear(joined, nullptr);
      } else {
        cuda::LaunchNorm(norm, nullptr);
        cuda::LaunchLinear(linear, nullptr);
      }
    }
    return Bytes(AllBytes(x), AllBytes(rows), AllBytes(outputs));
  }

 private:
  static std::vector<char> AllBytes(DeviceRows& rows) {
    const RowsView v = rows.Fetch();
    const std::vector<int64_t> cols(static_cast<size_t>(v.rows), v.cols);
    EXPECT_TRUE(rows.OthersUntouched(v.rows, cols));
    std::vector<char> bytes;
    for (int64_t r = 0; r < v.rows; ++r) {
      bytes.insert(bytes.end(), v.row(r), v.row(r) + v.cols * int64_t(SizeOf(v.dtype)));
    }
    return bytes;
  }

  JoinCase c_;
  Random random_;
  std::unique_ptr<cuda::CudaLinearBank> bank_;
  std::vector<float> x_, branch_, before_, results_;
  std::unique_ptr<cuda::DeviceArray<float>> scale_, shift_, bias_, weights_;
  std::unique_ptr<cuda::DeviceArray<int32_t>> group_, offsets_, of_row_;
};

// `times`: how often the launches follow each other on the same stream.
void ExpectSameBytes(const JoinCase& c, uint64_t seed, int times = 1) {
  SCOPED_TRACE(::testing::Message()
               << "width " << c.width << ", outputs " << c.outputs << ", rows " << c.rows);
  JoinScene scene(c, seed);
  const std::optional<Bytes> expected = scene.Run(std::nullopt, times);
  for (const cuda::JoinedForm form : {cuda::JoinedForm::kCluster, cuda::JoinedForm::kStream}) {
    SCOPED_TRACE(::testing::Message() << "form " << static_cast<int>(form));
    const std::optional<Bytes> actual = scene.Run(form, times);
    if (!actual.has_value()) {
      // Some layers have too many weights for one cluster.
      ASSERT_TRUE(form == cuda::JoinedForm::kCluster || !cuda::HasClusters());
      continue;
    }
    ASSERT_TRUE(std::get<0>(*actual) == std::get<0>(*expected)) << "residual stream";
    ASSERT_TRUE(std::get<1>(*actual) == std::get<1>(*expected)) << "normed rows";
    ASSERT_TRUE(std::get<2>(*actual) == std::get<2>(*expected)) << "outputs";
  }
}

// Rows of one warp and of one block; padding behind the inputs; more blocks of inputs than slots;
// more than one strip of outputs per block.
const JoinCase kSmallCases[] = {
    {.width = 64, .outputs = 64, .rows = 1},
    {.width = 72, .outputs = 70, .rows = 8, .layer = true, .bias = true, .sum = true, .gap = 8},
    {.width = 200, .outputs = 17, .rows = 3, .sum = true, .residual = true, .bf16 = true},
    {.width = 512, .outputs = 33, .rows = 7, .bias = true, .gap = 16},
    {.width = 520, .outputs = 100, .rows = 1, .layer = true, .bias = true, .gap = 8},
    {.width = 776, .outputs = 50, .rows = 2, .sum = true, .residual = true},
    {.width = 600, .outputs = 40, .rows = 5, .bias = true, .sum = true, .bf16 = true},
    {.width = 520, .outputs = 200, .rows = 8, .layer = true, .sum = true, .residual = true},
};
const JoinCase kLargeCases[] = {
    {.width = 2120, .outputs = 40, .rows = 3, .sum = true},
    {.width = 4160, .outputs = 32, .rows = 8, .bias = true, .sum = true, .residual = true},
    {.width = 6152, .outputs = 16, .rows = 1, .layer = true, .bias = true},
    {.width = 256, .outputs = 4240, .rows = 4, .sum = true},
    {.width = 520, .outputs = 6200, .rows = 2, .bias = true},
    {.width = 1032, .outputs = 14800, .rows = 1, .sum = true},
};

TEST(CudaJoinedLinearTest, HasTheBitsOfTwoLaunches) {
  uint64_t seed = 1;
  for (const JoinCase& c : kSmallCases) ASSERT_NO_FATAL_FAILURE(ExpectSameBytes(c, seed++));
  for (const JoinCase& c : kLargeCases) ASSERT_NO_FATAL_FAILURE(ExpectSameBytes(c, seed++));
}

TEST(CudaJoinedLinearTest, EveryOrder) {
  cuda::InEveryOrder([] {
    uint64_t seed = 20;
    for (const JoinCase& c : kSmallCases) ASSERT_NO_FATAL_FAILURE(ExpectSameBytes(c, seed++));
  });
}

// The counters of the blocks are 0 again after a launch.
TEST(CudaJoinedLinearTest, OneAfterAnother) {
  ExpectSameBytes({.width = 136, .outputs = 80, .rows = 4, .sum = true, .residual = true}, 40, 3);
  ExpectSameBytes({.width = 520, .outputs = 80, .rows = 3, .sum = true}, 41, 3);
}

TEST(CudaJoinedLinearTest, WhatTakesTwoLaunches) {
  if (!cuda::HasClusters()) GTEST_SKIP();
  const auto possible = [](const JoinCase& c, cuda::JoinedForm form) {
    return JoinScene(c, 1).Run(form).has_value();
  };
  for (const cuda::JoinedForm form : {cuda::JoinedForm::kCluster, cuda::JoinedForm::kStream}) {
    EXPECT_TRUE(possible({.rows = cuda::kMostJoinedRows}, form));
    EXPECT_FALSE(possible({.rows = cuda::kMostJoinedRows + 1}, form));
    EXPECT_FALSE(possible({.width = 68}, form));  // the rows are not of whole pieces
  }
  // More than 8 strips of outputs for each multiprocessor, and no memory for the rows.
  EXPECT_FALSE(possible({.outputs = 132 * 8 * 16 + 1}, cuda::JoinedForm::kAuto));
  EXPECT_FALSE(possible({.width = 12288, .rows = 8}, cuda::JoinedForm::kAuto));
}

// A block may store outputs while another one reads, so they must not share memory.
TEST(CudaJoinedLinearTest, OutputsInTheMemoryOfResults) {
  if (!cuda::HasClusters()) GTEST_SKIP();
  const int width = 64;
  auto bank =
      std::move(cuda::CudaLinearBank::Create({{width}, {width}, false, false, DType::kBF16}))
          .value();
  const DeviceRows x(1, width, width, DType::kF32), rows(1, width, width, DType::kBF16),
      branch(2, width, width, DType::kF32), results(4, width, width, DType::kBF16);
  const auto row = [](const RowsView& v, int64_t r) {
    RowsView one = v;
    one.data = v.row(r);
    one.rows = 1;
    return one;
  };
  const RoutingPlan plan{.rows = 1};
  const CombineArgs sum{.plan = &plan, .results = results.view(), .output = row(branch.view(), 0)};
  cuda::NormLaunch norm{.shape = {},
                        .width = width,
                        .input = x.view(),
                        .output = rows.view(),
                        .branch = row(branch.view(), 0)};
  RowsView of_results = row(results.view(), 3);
  cuda::JoinedLinear joined{
      .linear = {.bank = bank.get(), .input = rows.view(), .output = row(branch.view(), 1)},
      .norm = &norm,
      .form = cuda::JoinedForm::kStream};
  EXPECT_TRUE(cuda::CanJoin(joined, nullptr));
  joined.linear.output = norm.branch;
  EXPECT_FALSE(cuda::CanJoin(joined, nullptr));
  joined.linear.output = of_results;
  EXPECT_TRUE(cuda::CanJoin(joined, nullptr));
  norm.sum = &sum;
  EXPECT_FALSE(cuda::CanJoin(joined, nullptr));
  joined.form = cuda::JoinedForm::kCluster;
  EXPECT_TRUE(cuda::CanJoin(joined, nullptr));
}

}  // namespace
}  // namespace moeserve::testing

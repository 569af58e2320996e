// At the end of a step, the CPU backend must count the step's routing plans and report the tokens
// that no router could route.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "kernels/registry.h"
#include "tests/support/device_rows.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kTokens = 3, kSubTokens = 2, kWidth = 4, kExperts = 5, kTopK = 2, kSlot = 1;

class StepCountsTest : public ::testing::Test {
 protected:
  StepCountsTest() {
    backend_ = std::move(CreateBackend({.device = "cpu", .threads = 2})).value();
    RouteSettings settings;
    settings.num_experts = kExperts;
    settings.input_width = kWidth;
    settings.k = kTopK;
    Random random(3);
    RouterTensors tensors;
    tensors.weight = MakeTensor(random.Normals(kExperts * kWidth), {kExperts, kWidth});
    router_ = std::move(backend_->NewRouter(settings, tensors)).value();
    counters_ = std::move(backend_->NewRouteCounters(
                              {.blocks = {{.slot = kSlot,
                                           .num_experts = kExperts,
                                           .sub_tokens = kSubTokens,
                                           .most_distinct = kSubTokens * kTopK,
                                           .in_diversity = true,
                                           .expert_parameters = {1, 10, 100, 1000, 10000}}},
                               .vocabulary = 0}))
                    .value();
    rows_ = random.Normals(kTokens * kSubTokens * kWidth);
  }

  // `routes` selects whether the block is routed in this step.
  StepOutcome Step(bool routes, RouteCounters* counters) {
    const std::vector<int32_t> ids(kTokens, 0), positions = {0, 1, 2};
    kind_.assign(kTokens, kTokenDecode);
    backend_->BeginStep({.token_ids = ids,
                         .position = positions,
                         .sequence = ids,
                         .counters = counters,
                         .kind = kind_},
                        this, false);
    const DeviceRows rows = MakeRows(*backend_, rows_, kWidth);
    backend_->RunStep([&] {
      if (!routes) return;
      backend_->Route({.router = router_.get(), .input = rows.view, .slot = kSlot});
    });
    return backend_->FinishStep();
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<RouteCounters> counters_;
  std::vector<float> rows_;
  std::vector<uint8_t> kind_;
};

TEST_F(StepCountsTest, CountsAreVisibleWhenAStepEnds) {
  const StepOutcome outcome = Step(true, counters_.get());
  ASSERT_EQ(outcome.routes.size(), static_cast<size_t>(kTokens));
  const CountsSnapshot counts = counters_->Read();
  EXPECT_EQ(counts.model.steps, 1u);
  EXPECT_EQ(counts.model.tokens[kTokenDecode], static_cast<uint64_t>(kTokens));
  uint64_t selections = 0, parameters = 0, expected_parameters = 0, scale = 1;
  for (const ExpertCount& e : counts.blocks[0].experts) {
    selections += e.selections;
    expected_parameters += e.selections * scale;
    scale *= 10;
  }
  EXPECT_EQ(selections, static_cast<uint64_t>(kTokens * kSubTokens * kTopK));
  for (const TokenRoutes& t : outcome.routes) {
    EXPECT_EQ(t.routes, static_cast<uint64_t>(kSubTokens * kTopK));
    parameters += t.parameters;
  }
  EXPECT_EQ(parameters, expected_parameters);
}

TEST_F(StepCountsTest, APlanOfAnEarlierStepIsNotCountedAgain) {
  Step(true, counters_.get());
  const StepOutcome outcome = Step(false, counters_.get());
  for (const TokenRoutes& t : outcome.routes) EXPECT_EQ(t.routes, 0u);
  const CountsSnapshot counts = counters_->Read();
  EXPECT_EQ(counts.model.steps, 2u);
  uint64_t selections = 0;
  for (const ExpertCount& e : counts.blocks[0].experts) selections += e.selections;
  EXPECT_EQ(selections, static_cast<uint64_t>(kTokens * kSubTokens * kTopK));
}

TEST_F(StepCountsTest, ATokenFailsWithAnyOfItsRows) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  rows_[(1 * kSubTokens + 1) * kWidth + 2] = nan;  // second sub-token of token 1
  for (RouteCounters* counters : {static_cast<RouteCounters*>(nullptr), counters_.get()}) {
    const StepOutcome outcome = Step(true, counters);
    ASSERT_EQ(outcome.failed.size(), static_cast<size_t>(kTokens));
    EXPECT_EQ(outcome.failed[0], 0);
    EXPECT_EQ(outcome.failed[1], 1);
    EXPECT_EQ(outcome.failed[2], 0);
    EXPECT_EQ(outcome.routes.empty(), counters == nullptr);
  }
  EXPECT_EQ(counters_->Read().blocks[0].nonfinite_rows, 1u);
  rows_[(1 * kSubTokens + 1) * kWidth + 2] = 0.0f;
  EXPECT_EQ(Step(true, nullptr).failed[1], 0) << "failures of an earlier step remain";
}

}  // namespace
}  // namespace moeserve::testing

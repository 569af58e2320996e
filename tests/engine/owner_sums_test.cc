// When owners add results, and how many bytes ranks then send.
#include "engine/layers/routed/owner_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/routes/route_layout.h"
#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

// A step of bf16 tokens of width 4096.
SumCosts CostsOf(int ranks, int64_t tokens, int chosen, bool outputs_gathered = false) {
  return {.ranks = ranks,
          .results = tokens * chosen,
          .result_bytes = 4096 * 2,
          .tokens = tokens,
          .sum_bytes = 4096 * 4,
          .outputs_gathered = outputs_gathered};
}

TEST(OwnerSumsTest, AutoTakesThemWhereTheySaveBytes) {
  constexpr SplitChoice kAuto = SplitChoice::kAuto;
  // k b (1 - 1/P) > 4.
  EXPECT_TRUE(OwnersAdd(kAuto, CostsOf(4, 256, 8)));
  EXPECT_TRUE(OwnersAdd(kAuto, CostsOf(2, 256, 8)));
  EXPECT_TRUE(OwnersAdd(kAuto, CostsOf(4, 256, 3)));
  EXPECT_FALSE(OwnersAdd(kAuto, CostsOf(2, 256, 4))) << "as many bytes";
  EXPECT_FALSE(OwnersAdd(kAuto, CostsOf(8, 100000, 2)));
  // One token saves (8 * 2 * 3/4 - 4) * 4096 * 3/4 = 24 KB.
  EXPECT_FALSE(OwnersAdd(kAuto, CostsOf(4, 1, 8)));
  EXPECT_FALSE(OwnersAdd(kAuto, CostsOf(4, 2, 8)));
  EXPECT_TRUE(OwnersAdd(kAuto, CostsOf(4, 3, 8)));
  // The second exchange takes place anyway.
  EXPECT_TRUE(OwnersAdd(kAuto, CostsOf(2, 16, 1, true)));
  SumCosts nothing = CostsOf(2, 16, 1, true);
  nothing.results = 0;
  EXPECT_FALSE(OwnersAdd(kAuto, nothing));
}

TEST(OwnerSumsTest, AChoiceIsObeyed) {
  EXPECT_TRUE(OwnersAdd(SplitChoice::kOn, CostsOf(2, 1, 1)));
  EXPECT_FALSE(OwnersAdd(SplitChoice::kOff, CostsOf(4, 256, 8)));
  EXPECT_FALSE(OwnersAdd(SplitChoice::kOn, CostsOf(1, 256, 8))) << "there are no others";
}

// What the ranks send in a routed block, each to all others together.
struct BlockBytes {
  std::vector<int64_t> results;  // if every rank adds all results
  std::vector<int64_t> scattered, sums;
};

// Returns what follows from the plan of a step.
BlockBytes BytesOf(const ModelSpec& spec, int slot, const RoutingPlan& plan, int ranks,
                   bool divide_rows, DType activation) {
  const BlockSpec& block = spec.blocks[static_cast<size_t>(slot)];
  const RoutedLayerSpec& routing = *block.routing();
  const FeedForwardSpec* const feed_forward = block.feed_forward();
  const AttentionSpec* const attention = block.attention();
  const bool values = attention != nullptr && attention->value_routing.has_value();
  const int64_t d = spec.hidden_size, heads = routing.split.heads;
  const int64_t width = values                     ? attention->value_width()
                        : routing.latent_width > 0 ? routing.latent_width
                                                   : d / heads;
  const int64_t result = (width + 15) / 16 * 16 * static_cast<int64_t>(SizeOf(activation));
  const bool follows =
      routing.split.merge_projection || routing.latent_width > 0 ||
      (feed_forward != nullptr && feed_forward->shared_width > 0 && !feed_forward->late_experts);
  const std::vector<int64_t> parameters = PlaceParameters(block);
  std::vector<int32_t> rows;
  for (size_t e = 0; e < parameters.size(); ++e) {
    rows.push_back(plan.expert_offsets[e + 1] - plan.expert_offsets[e]);
  }
  const ExpertPlacement placement = ExpertPlacement::Balanced(spec, ranks);
  const std::vector<int> owners =
      OwnersOf(rows, parameters, placement.holders(spec.stack, slot), ranks);
  const auto size = static_cast<size_t>(ranks);
  BlockBytes bytes{std::vector<int64_t>(size), std::vector<int64_t>(size),
                   std::vector<int64_t>(size)};
  const int64_t tokens = plan.rows / heads;
  for (int32_t a = 0; a < plan.num_assignments; ++a) {
    const auto e = static_cast<size_t>(plan.expert_of_assignment[a]);
    if (e >= owners.size() || owners[e] < 0) continue;
    const auto owner = static_cast<size_t>(owners[e]);
    bytes.results[owner] += result * (ranks - 1);
    const int64_t token = plan.row_of_assignment[a] / heads;
    const bool kept =
        token >= tokens * owners[e] / ranks && token < tokens * (owners[e] + 1) / ranks;
    if (!kept) bytes.scattered[owner] += result;
  }
  // The gather of the outputs is none more if rows are divided behind the sums anyway.
  for (int64_t r = 0; r < ranks && !(divide_rows && follows); ++r) {
    const int64_t own = tokens * (r + 1) / ranks - tokens * r / ranks;
    bytes.sums[static_cast<size_t>(r)] = own * (values ? width : d) * 4 * (ranks - 1);
  }
  return bytes;
}

struct Counted {
  int64_t gathers = 0, all_to_alls = 0;  // bytes
  uint64_t exchanges = 0;
};

class OwnerSumBytesTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (TestDevice() != "cpu") GTEST_SKIP() << "ranks are on CPUs";
    for (int32_t t = 0; t < 33; ++t) prompt_.push_back(t * 7 % 40);
  }

  RunnerOptions Options() const {
    return {.compute = DType::kBF16, .threads = 1, .cache_tokens = 256};
  }

  std::vector<Counted> RunRanks(int ranks, SplitChoice rows, SplitChoice sums) const {
    std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
    std::vector<Counted> counted(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (size_t r = 0; r < counted.size(); ++r) {
      threads.emplace_back([&, r] {
        MessageExchange exchange(std::move(transports[r]), {.check_order = true});
        RunnerOptions options = Options();
        options.exchange = &exchange;
        options.split_rows = rows;
        options.split_head = SplitChoice::kOff;
        options.owner_sums = sums;
        auto runner = ModelRunner::Load(SourcePath(GetParam()), options);
        ASSERT_TRUE(runner.ok()) << runner.status();
        const ExchangeCounts before = exchange.counts();
        (*runner)->Run(prompt_, static_cast<int>(prompt_.size()));
        const ExchangeCounts after = exchange.counts();
        const auto sent = [&](ExchangeKind kind) {
          const auto k = static_cast<size_t>(kind);
          return static_cast<int64_t>(after.sent_by[k] - before.sent_by[k]);
        };
        counted[r] = {sent(ExchangeKind::kGather), sent(ExchangeKind::kAllToAll),
                      after.gathers - before.gathers};
        EXPECT_TRUE(exchange.status().ok()) << exchange.status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return counted;
  }

  std::vector<int32_t> prompt_;
};

TEST_P(OwnerSumBytesTest, AreThoseOfThePlan) {
  constexpr SplitChoice kOn = SplitChoice::kOn, kOff = SplitChoice::kOff;
  auto loaded = ModelRunner::Load(SourcePath(GetParam()), Options());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ModelRunner& one = **loaded;
  const RouteLayout layout(one.spec());
  for (const int ranks : {2, 4}) {
    for (const SplitChoice rows : {kOff, kOn}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, rows divided: " << (rows == kOn));
      std::vector<BlockBytes> blocks;
      StepSetup setup;
      setup.options.report.plans = true;
      setup.report = [&](const StepReport& report) {
        for (const BlockReport& block : report.blocks) {
          const int slot = layout.blocks[static_cast<size_t>(block.index)].slot;
          blocks.push_back(BytesOf(one.spec(), slot, block.plan, ranks, rows == kOn, DType::kBF16));
        }
      };
      one.Run(prompt_, static_cast<int>(prompt_.size()), 0, setup);
      ASSERT_FALSE(blocks.empty());
      const std::vector<Counted> all = RunRanks(ranks, rows, kOff),
                                 owners = RunRanks(ranks, rows, kOn);
      uint64_t more = 0;
      for (size_t r = 0; r < all.size(); ++r) {
        BlockBytes sum{{0}, {0}, {0}};
        more = 0;
        for (const BlockBytes& block : blocks) {
          sum.results[0] += block.results[r];
          sum.scattered[0] += block.scattered[r];
          sum.sums[0] += block.sums[r];
          more += block.sums[0] > 0;
        }
        EXPECT_EQ(all[r].all_to_alls, 0);
        EXPECT_EQ(owners[r].all_to_alls, sum.scattered[0]);
        EXPECT_EQ(owners[r].gathers, all[r].gathers - sum.results[0] + sum.sums[0]);
        if (rows == kOff) {
          EXPECT_EQ(all[r].gathers, sum.results[0]);
        }
        EXPECT_EQ(owners[r].exchanges, all[r].exchanges + more);
      }
    }
  }
}

// Sub-tokens with projections; attention; unequal numbers of experts; shared experts, also beside
// latent ones; experts without matrices; routed values.
INSTANTIATE_TEST_SUITE_P(Models, OwnerSumBytesTest,
                         ::testing::Values("deploy/models/mh-moe", "deploy/models/moa",
                                           "deploy/models/hmoe-topp",
                                           "tests/golden/families/deepseek-v3",
                                           "tests/golden/families/nemotron-h-latent-groups",
                                           "tests/golden/families/longcat-flash",
                                           "tests/golden/families/k2-horizon-mova"),
                         [](const auto& info) {
                           const std::string path = info.param;
                           std::string name = path.substr(path.rfind('/') + 1);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing

// An engine whose model is computed by several ranks gives the answers, records and statistics of
// an engine alone.
#include <gtest/gtest.h>

#include <memory>

#include "engine/ranks/rebalancer.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"
#include "tests/support/ranked_engine.h"

namespace moeserve::testing {
namespace {

class RanksEngineTest : public ::testing::TestWithParam<RankedModel> {
 protected:
  static bool OnCpu() { return TestDevice() == "cpu"; }

  static EngineOptions Options() {
    EngineOptions options;
    options.max_model_len = 64;
    options.routing_records = true;
    options.routing_control = {.enabled = true};
    if (GetParam().predictions) options.draft.max_tokens = 2;
    return options;
  }

  // Requests with prompts that share prefixes; some are drawn, one changes its routing.
  static Request RequestOf(int i) {
    Request r;
    r.id = std::to_string(i);
    for (int t = 0; t < 20 + i % 3; ++t) r.prompt.push_back((t * 7 + (t > 16 ? i : i % 2)) % 40);
    if (GetParam().pair) r.source = r.prompt;
    r.sampling.max_tokens = 12;
    r.sampling.temperature = i % 3 == 2 ? 0.9 : 0.0;
    r.sampling.seed = static_cast<uint64_t>(i);
    r.sampling.ignore_eos = true;
    r.sampling.logprobs = 2;
    r.routing_record = true;
    return r;
  }

  struct Answers {
    std::vector<AnswerBits> bits;
    std::vector<RoutingRecord> records;
  };
  static constexpr int kRequests = 8;

  static void Add(CollectingSink& sink, Answers& answers) {
    answers.bits.push_back(BitsOf(sink));
    answers.records.push_back(sink.routing());
  }
  static Answers OneAfterAnother(TestEngine& engine) {
    Answers answers;
    for (int i = 0; i < kRequests; ++i) Add(*engine.Submit(RequestOf(i)), answers);
    return answers;
  }
  static Answers Together(TestEngine& engine) {
    Answers answers;
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int i = 0; i < kRequests; ++i) sinks.push_back(engine.Submit(RequestOf(i)));
    for (const auto& sink : sinks) Add(*sink, answers);
    engine.ExpectIdle();
    return answers;
  }
  static void ExpectSame(const Answers& a, const Answers& b) {
    for (size_t i = 0; i < kRequests; ++i) {
      EXPECT_TRUE(a.bits[i] == b.bits[i]) << "request " << i;
      ExpectSameRoutes(a.records[i], b.records[i], "request " + std::to_string(i));
    }
  }
};

TEST_P(RanksEngineTest, AnswersAndStatisticsAreThoseOfOneProcess) {
  int64_t one_sequence = 0;
  Answers alone;
  ExpertStats expected;
  {
    const auto engine =
        TestEngine::Start(SourcePath(GetParam().folder), Options(), GetParam().compute(),
                          TestDevice(), GetParam().quantization, {}, GetParam().predictions);
    ASSERT_TRUE(engine.ok()) << engine.status();
    one_sequence = (*engine)->BytesFor(64);
    alone = OneAfterAnother(**engine);
    expected = (*engine)->get().ExpertSnapshot();
  }
  struct Setup {
    int ranks;
    // Of one request after another, and of steps of 1 to 9 rows. Of the former, auto divides the
    // prompts alone between two ranks.
    Splits alone, together;
  };
  constexpr SplitChoice kAuto = SplitChoice::kAuto, kOn = SplitChoice::kOn,
                        kOff = SplitChoice::kOff;
  for (const auto& [ranks, splits, splits_together] :
       {Setup{2, {kAuto, kOn, kOn}, {kOff, kOff, kOff}},
        Setup{4, {kOff, kAuto, kOff}, {kOn, kOn, kOn}}}) {
    if (!OnCpu() && ranks > 2) continue;  // other devices may be emulated, which takes long
    SCOPED_TRACE(ranks);
    {
      const auto ranked = RankedEngine::Start(GetParam(), Options(), ranks, {.splits = splits});
      ASSERT_TRUE(ranked->started());
      ExpectSame(OneAfterAnother(ranked->engine()), alone);
      const ExpertStats found = ranked->engine().get().ExpertSnapshot();
      ASSERT_EQ(found.blocks.size(), expected.blocks.size());
      for (size_t b = 0; b < found.blocks.size(); ++b) {
        EXPECT_EQ(found.blocks[b].selections, expected.blocks[b].selections) << "block " << b;
      }
    }
    // Small steps, and so little memory that requests are preempted.
    EngineOptions options = Options();
    options.max_num_seqs = 4;
    options.max_step_tokens = 9;
    options.kv_cache_bytes = 2 * one_sequence;
    const auto ranked =
        RankedEngine::Start(GetParam(), options, ranks, {.splits = splits_together});
    ASSERT_TRUE(ranked->started());
    ExpectSame(Together(ranked->engine()), alone);
  }
}

TEST_P(RanksEngineTest, AnswersAreTheSameWhileExpertsMove) {
  Answers alone;
  {
    const auto engine =
        TestEngine::Start(SourcePath(GetParam().folder), Options(), GetParam().compute(),
                          TestDevice(), GetParam().quantization, {}, GetParam().predictions);
    ASSERT_TRUE(engine.ok()) << engine.status();
    alone = OneAfterAnother(**engine);
  }
  constexpr Splits kUndivided{SplitChoice::kOff, SplitChoice::kOff, SplitChoice::kOff};
  constexpr Splits kDivided{SplitChoice::kOn, SplitChoice::kOn, SplitChoice::kOn};
  for (const auto& [ranks, splits] : {std::pair(2, kUndivided), std::pair(3, kDivided)}) {
    if (!OnCpu() && ranks > 2) continue;  // other devices may be emulated, which takes long
    SCOPED_TRACE(ranks);
    const auto ranked = RankedEngine::Start(GetParam(), Options(), ranks,
                                            {.splits = splits, .moves = Moves::kAlways});
    ASSERT_TRUE(ranked->started());
    ExpectSame(OneAfterAnother(ranked->engine()), alone);
    // The last one may not be in use yet.
    EXPECT_GE(ranked->placements(), ranked->steps() / 3);
    EXPECT_GT(ranked->placements(), 3);
  }
}

// The leader times a step with the most rows, and says how long ranks wait from then on.
TEST_P(RanksEngineTest, StepsAreTimedAndWaitsLimited) {
  EngineOptions options = Options();
  Answers expected;
  for (const bool try_model : {false, true}) {
    options.try_model = try_model;
    const auto ranked = RankedEngine::Start(GetParam(), options, 2, {.timeout = absl::Seconds(77)});
    ASSERT_TRUE(ranked->started());
    EXPECT_EQ(ranked->leader().longest_step() > absl::ZeroDuration(), try_model);
    const Answers answers = OneAfterAnother(ranked->engine());
    if (!try_model) expected = answers;
    ExpectSame(answers, expected);
  }
}

// If checksums differ, all ranks look at their files. Here these are as they were: nothing else is
// found, and the followers wait for the next step.
TEST_P(RanksEngineTest, OtherResultsEndAllRequests) {
  const auto ranked = RankedEngine::Start(GetParam(), Options(), 3, {.disagree_in = 2});
  ASSERT_TRUE(ranked->started());
  const absl::Status expected = absl::InternalError(
      "rank 1: expected the results of rank 0 in step 2, found others; the ranks differ in files, "
      "programs or hardware");
  EXPECT_EQ(ranked->engine().Submit(RequestOf(0))->Wait(), expected);
  EXPECT_EQ(ranked->leader().status(), expected);
  EXPECT_FALSE(ranked->engine().get().Stats().healthy);
}

// Ranks that cannot load an expert go on with the experts that they have.
TEST_P(RanksEngineTest, ExpertsThatCannotMoveStay) {
  const auto ranked = RankedEngine::Start(GetParam(), Options(), 2, {.moves = Moves::kImpossible});
  ASSERT_TRUE(ranked->started());
  const Answers first = OneAfterAnother(ranked->engine());
  ExpectSame(OneAfterAnother(ranked->engine()), first);
  EXPECT_EQ(ranked->placements(), 1);
}

// Ranks that read their experts from mapped files leave them there.
TEST_P(RanksEngineTest, ExpertsOfMappedFilesStay) {
  if (!OnCpu()) GTEST_SKIP() << "CPUs only map files";
  const TempFolder folder;
  Answers alone;
  {
    const auto engine = TestEngine::Start(SourcePath(GetParam().folder), Options(),
                                          GetParam().compute(), "cpu", GetParam().quantization, {},
                                          GetParam().predictions, {.packed_folder = folder.path()});
    ASSERT_TRUE(engine.ok()) << engine.status();
    alone = OneAfterAnother(**engine);
  }
  const auto ranked = RankedEngine::Start(
      GetParam(), Options(), 2, {.moves = Moves::kAlways, .packed_folder = folder.path()});
  ASSERT_TRUE(ranked->started());
  ExpectSame(OneAfterAnother(ranked->engine()), alone);
  EXPECT_GT(ranked->steps(), 6);
  EXPECT_EQ(ranked->placements(), 1);
}

// Blocks whose experts a rank could not take are not planned again.
TEST_P(RanksEngineTest, ARefusedRoundIsNotRepeated) {
  if (!OnCpu()) GTEST_SKIP() << "about plans, which no device changes";
  const auto ranked = RankedEngine::Start(GetParam(), Options(), 2, {.moves = Moves::kRefused});
  ASSERT_TRUE(ranked->started());
  const Answers first = OneAfterAnother(ranked->engine());
  const ExpertSizes parameters = ExpertParameters(ranked->spec());
  Rebalancer rebalancer(ranked->leader(), ranked->watch(),
                        {.interval = absl::ZeroDuration(),
                         .limits = {.imbalance = 1.0, .gain = 0.0},
                         .parameters = parameters,
                         .bytes = parameters});
  size_t rounds = 0;
  for (; rounds <= parameters.size() && rebalancer.RunRound() > 0; ++rounds) {
    ExpectSame(OneAfterAnother(ranked->engine()), first);
  }
  EXPECT_LE(rounds, parameters.size()) << "each round has a block that no earlier one had";
  EXPECT_EQ(rebalancer.moved_bytes(), 0);
  EXPECT_EQ(ranked->placements(), 1);
}

// The leader moves experts by itself, from what it has counted.
TEST_P(RanksEngineTest, UnequalRanksAreRebalanced) {
  if (!OnCpu()) GTEST_SKIP() << "about plans, which no device changes";
  const auto ranked = RankedEngine::Start(GetParam(), Options(), 2);
  ASSERT_TRUE(ranked->started());
  const Answers before = OneAfterAnother(ranked->engine());
  EXPECT_GE(ranked->watch().imbalance(), 1.0);
  EXPECT_LE(ranked->watch().imbalance(), 2.0);
  const ExpertSizes parameters = ExpertParameters(ranked->spec());
  // Whatever helps at all.
  const RebalanceLimits limits{.imbalance = 1.0, .gain = 0.0};
  Rebalancer rebalancer(ranked->leader(), ranked->watch(),
                        {.interval = absl::ZeroDuration(),
                         .limits = limits,
                         .parameters = parameters,
                         .bytes = parameters});
  const int64_t moved = rebalancer.RunRound();
  EXPECT_EQ(rebalancer.moved_bytes(), 0) << "nothing has taken effect";
  if (moved > 0) {
    EXPECT_EQ(rebalancer.RunRound(), 0) << "a round is under way";
  }
  // Experts are loaded in the background, while there are steps.
  const int expected = moved > 0 ? 2 : 1;
  for (int i = 0; i < 200 && (i == 0 || ranked->placements() < expected); ++i) {
    ExpectSame(OneAfterAnother(ranked->engine()), before);
  }
  EXPECT_EQ(ranked->placements(), expected);
  EXPECT_EQ(rebalancer.moved_bytes(), moved);
  rebalancer.Stop();
  EXPECT_EQ(rebalancer.RunRound(), 0);
}

constexpr RankedModel kModels[] = {
    {"mh_moe", "deploy/models/mh-moe"},
    {"moa", "deploy/models/moa"},
    {"moa_translator", "deploy/models/moa-translator", Quantization::kNone, false, true},
    {"hmoe_topp", "deploy/models/hmoe-topp", Quantization::kInt8Channel},
    {"hmoe_topp_int4_k", "deploy/models/hmoe-topp", Quantization::kInt4K},
    {"deepseek_v3_mtp", "tests/golden/families/deepseek-v3-mtp", Quantization::kNone, true},
    {"gpt_oss", "tests/golden/families/gpt-oss"},
    {"qwen3_next", "tests/golden/families/qwen3-next"},
    {"lfm2_moe", "tests/golden/families/lfm2-moe"},
    {"longcat_flash", "tests/golden/families/longcat-flash"}};
INSTANTIATE_TEST_SUITE_P(Models, RanksEngineTest, ::testing::ValuesIn(kModels),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moeserve::testing

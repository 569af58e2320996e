// What the engine promises holds for every family of checkpoint folders: a request's results do not
// depend on other requests, on cached prefixes, on preemptions or on drafts; counters, routing
// records and overrides are exact. All folders are tested with all types of weights.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/family_cases.h"

namespace moeserve::testing {
namespace {

constexpr int kGenerated = 24;
constexpr int kMaxLength = 64;

struct Weights {
  const char* name;
  DType compute;
  Quantization quantization;
};
constexpr Weights kFamilyWeights[] = {{"f32", DType::kF32, Quantization::kNone},
                                      {"int8", DType::kBF16, Quantization::kInt8},
                                      {"int8-channel", DType::kBF16, Quantization::kInt8Channel},
                                      {"int4", DType::kBF16, Quantization::kInt4},
                                      {"int4-k", DType::kBF16, Quantization::kInt4K}};

class FamilyEngineTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override {
    auto answers = ReadFamilyAnswers(GetParam().folder);
    ASSERT_TRUE(answers.ok()) << answers.status();
    answers_ = *std::move(answers);
  }

  std::unique_ptr<TestEngine> Start(const Weights& weights, EngineOptions options) const {
    options.max_model_len = kMaxLength;
    options.routing_records = true;
    options.routing_control = {.enabled = true};
    auto engine =
        TestEngine::Start(GetParam().folder, options, weights.compute, "cpu", weights.quantization);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  Request Greedy(const std::string& id, int prompt) const {
    Request r;
    r.id = id;
    r.prompt = answers_.Prompt(prompt);
    r.sampling.max_tokens = kGenerated;
    r.sampling.temperature = 0.0;
    r.sampling.ignore_eos = true;
    r.sampling.logprobs = 2;
    r.routing_record = true;
    return r;
  }

  // Expects the same tokens, log-probabilities and routes, bit by bit.
  static void ExpectSame(const CollectingSink& a, const CollectingSink& b) {
    EXPECT_EQ(a.tokens(), b.tokens());
    ASSERT_EQ(a.logprobs().size(), b.logprobs().size());
    for (size_t i = 0; i < a.logprobs().size(); ++i) {
      EXPECT_EQ(a.logprobs()[i].logprob, b.logprobs()[i].logprob) << "token " << i;
    }
    EXPECT_EQ(a.routing().offsets, b.routing().offsets);
    EXPECT_EQ(a.routing().experts, b.routing().experts);
    EXPECT_EQ(a.routing().weights, b.routing().weights);
  }

  void RunInCompany(const Weights& weights) const;
  void RunWithDrafts(const Weights& weights,
                     const std::vector<std::shared_ptr<CollectingSink>>& alone,
                     int64_t kv_cache_bytes) const;
  void RunWithOverride(const Weights& weights) const;
  void RunSamples(const Weights& weights) const;

  FamilyAnswers answers_;
};

TEST_P(FamilyEngineTest, CompanyChangesNothingAndCountsAreExact) {
  for (const Weights& weights : kFamilyWeights) {
    SCOPED_TRACE(weights.name);
    RunInCompany(weights);
  }
}

TEST_P(FamilyEngineTest, OverridesConcernTheirRequestOnly) {
  for (const Weights& weights : kFamilyWeights) {
    SCOPED_TRACE(weights.name);
    RunWithOverride(weights);
  }
}

TEST_P(FamilyEngineTest, SamplesOfOnePromptAreSingleRequests) {
  for (const Weights& weights : kFamilyWeights) {
    SCOPED_TRACE(weights.name);
    RunSamples(weights);
  }
}

// A model is replaced while it serves: the new one, here with other weights, starts beside it, and
// the old one ends its requests and goes while the new one computes.
TEST_P(FamilyEngineTest, AModelIsReplacedWhileItServes) {
  const auto answer = [&](const Weights& weights) {
    const auto engine = Start(weights, {});
    auto sink = engine->Submit(Greedy("alone", 0));
    EXPECT_TRUE(sink->Wait().ok()) << sink->Wait();
    return sink;
  };
  const auto before = answer(kFamilyWeights[0]), after = answer(kFamilyWeights[1]);
  auto old = Start(kFamilyWeights[0], {});
  const auto last = old->Submit(Greedy("last", 0));
  const auto fresh = Start(kFamilyWeights[1], {});
  const auto first = fresh->Submit(Greedy("first", 0));
  EXPECT_TRUE(old->get().Drain(absl::Now() + absl::Minutes(1)));
  old.reset();
  const auto second = fresh->Submit(Greedy("second", 0));
  ASSERT_TRUE(last->Wait().ok() && first->Wait().ok() && second->Wait().ok());
  ExpectSame(*last, *before);
  ExpectSame(*first, *after);
  ExpectSame(*second, *after);
}

// Runs requests alone, then together in steps of a few tokens, with cached prefixes and with so
// little memory that requests are preempted. Compares the results, and the counters with the
// routing records.
void FamilyEngineTest::RunInCompany(const Weights& weights) const {
  std::vector<std::shared_ptr<CollectingSink>> alone;
  int64_t one_sequence = 0;
  {
    auto engine = Start(weights, {.max_num_seqs = 1, .prefix_cache = false});
    ASSERT_NE(engine, nullptr);
    one_sequence = engine->BytesFor(kMaxLength);
    for (int p = 0; p < answers_.prompts; ++p) {
      alone.push_back(engine->Submit(Greedy(std::to_string(p), p)));
      ASSERT_TRUE(alone.back()->Wait().ok()) << alone.back()->Wait();
    }
  }
  auto engine =
      Start(weights, {.max_num_seqs = 4, .max_step_tokens = 9, .kv_cache_bytes = 2 * one_sequence});
  ASSERT_NE(engine, nullptr);
  std::vector<std::shared_ptr<CollectingSink>> together;
  for (int i = 0; i < 3 * answers_.prompts; ++i) {
    together.push_back(engine->Submit(Greedy(std::to_string(i), i % answers_.prompts)));
  }
  const RouteLayout& layout = engine->get().route_layout();
  std::vector<uint64_t> counts(static_cast<size_t>(layout.num_experts));
  for (size_t i = 0; i < together.size(); ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    ASSERT_TRUE(together[i]->Wait().ok()) << together[i]->Wait();
    ExpectSame(*together[i], *alone[i % alone.size()]);
    const RoutingRecord& record = together[i]->routing();
    for (int t = 0; t < record.tokens; ++t) {
      bool reused = false;
      for (const auto& [begin, end] : record.reused) reused |= t >= begin && t < end;
      for (int row = 0; row < layout.rows_per_token && !reused; ++row) {
        const size_t r = static_cast<size_t>(t) * layout.rows_per_token + row;
        const RoutedBlock& block = layout.blocks[layout.block_of_row[row]];
        for (uint32_t a = record.offsets[r]; a < record.offsets[r + 1]; ++a) {
          ++counts[block.first_expert + record.experts[a]];
        }
      }
    }
  }
  engine->ExpectIdle();
  const ExpertStats stats = engine->get().ExpertSnapshot();
  ASSERT_EQ(stats.blocks.size(), layout.blocks.size());
  for (size_t i = 0; i < stats.blocks.size(); ++i) {
    for (int e = 0; e < stats.blocks[i].num_experts; ++e) {
      EXPECT_EQ(stats.blocks[i].selections[static_cast<size_t>(e)],
                counts[layout.blocks[i].first_expert + static_cast<size_t>(e)])
          << "block " << i << ", expert " << e;
    }
  }
  RunWithDrafts(weights, alone, 2 * one_sequence);
}

// Runs the requests of `alone` again with right, partly wrong and no predictions, so that drafts
// are accepted and rejected.
void FamilyEngineTest::RunWithDrafts(const Weights& weights,
                                     const std::vector<std::shared_ptr<CollectingSink>>& alone,
                                     int64_t kv_cache_bytes) const {
  auto engine = Start(weights, {.max_num_seqs = 4,
                                .max_step_tokens = 9,
                                .kv_cache_bytes = kv_cache_bytes,
                                .draft = {.max_tokens = 4, .always = true}});
  ASSERT_NE(engine, nullptr);
  std::vector<std::shared_ptr<CollectingSink>> drafted;
  for (int i = 0; i < 3 * answers_.prompts; ++i) {
    const int prompt = i % answers_.prompts;
    Request r = Greedy(std::to_string(i), prompt);
    const int kind = i / answers_.prompts;
    if (kind < 2) r.prediction = alone[static_cast<size_t>(prompt)]->tokens();
    for (size_t t = 2; kind == 1 && t < r.prediction.size(); t += 5) {
      r.prediction[t] = (r.prediction[t] + 1) % answers_.vocab;
    }
    drafted.push_back(engine->Submit(r));
  }
  for (size_t i = 0; i < drafted.size(); ++i) {
    SCOPED_TRACE("request with drafts " + std::to_string(i));
    ASSERT_TRUE(drafted[i]->Wait().ok()) << drafted[i]->Wait();
    ExpectSame(*drafted[i], *alone[i % alone.size()]);
  }
  engine->ExpectIdle();
  const EngineStats stats = engine->get().Stats();
  EXPECT_GT(stats.accepted_tokens, 0u);
  EXPECT_GT(stats.drafted_tokens, stats.accepted_tokens);
}

// Samples share the pages and copy the states of their prompt.
void FamilyEngineTest::RunSamples(const Weights& weights) const {
  constexpr int kSamples = 3;
  const auto sample = [&](int index) {
    Request r = Greedy(std::to_string(index), 0);
    r.sampling.temperature = 1.0;
    r.sampling.seed = 5;
    r.sampling.sample_index = index;
    return r;
  };
  auto engine = Start(weights, {.max_num_seqs = 4, .max_step_tokens = 9, .prefix_cache = false});
  ASSERT_NE(engine, nullptr);
  std::vector<Request> requests;
  std::vector<std::shared_ptr<CollectingSink>> together;
  for (int i = 0; i < kSamples; ++i) {
    requests.push_back(sample(i));
    together.push_back(std::make_shared<CollectingSink>());
  }
  ASSERT_TRUE(engine->get().Submit(std::move(requests), {together.begin(), together.end()}).ok());
  for (int i = 0; i < kSamples; ++i) {
    SCOPED_TRACE("sample " + std::to_string(i));
    ASSERT_TRUE(together[static_cast<size_t>(i)]->Wait().ok());
    const auto alone = engine->Submit(sample(i));
    ASSERT_TRUE(alone->Wait().ok()) << alone->Wait();
    EXPECT_EQ(together[static_cast<size_t>(i)]->tokens(), alone->tokens());
    for (size_t t = 0; t < alone->logprobs().size(); ++t) {
      EXPECT_EQ(together[static_cast<size_t>(i)]->logprobs()[t].logprob,
                alone->logprobs()[t].logprob)
          << "token " << t;
    }
  }
}

// A request that may not use expert 0 does not use it, and a request beside it notices nothing.
void FamilyEngineTest::RunWithOverride(const Weights& weights) const {
  auto engine = Start(weights, {});
  ASSERT_NE(engine, nullptr);
  const RouteLayout& layout = engine->get().route_layout();
  if (layout.blocks.empty()) return;  // a dense model
  RoutingChange change;
  for (const RoutedBlock& block : layout.blocks) {
    change.experts.push_back({block.layer, block.block, 0, std::nullopt});
  }
  const auto control = RoutingControl::Create(change, engine->get().spec(), {.enabled = true});
  ASSERT_TRUE(control.ok()) << control.status();
  auto plain = engine->Submit(Greedy("plain", 0));
  ASSERT_TRUE(plain->Wait().ok());
  Request changed = Greedy("changed", 0);
  changed.routing_control = std::make_shared<const RoutingControl>(*control);
  auto other = engine->Submit(changed);
  auto again = engine->Submit(Greedy("again", 0));
  ASSERT_TRUE(other->Wait().ok());
  ASSERT_TRUE(again->Wait().ok());
  ExpectSame(*again, *plain);
  const RoutingRecord& record = other->routing();
  for (size_t r = 0; r + 1 < record.offsets.size(); ++r) {
    EXPECT_GT(record.offsets[r + 1], record.offsets[r]) << "row " << r;
  }
  for (const uint16_t e : record.experts) ASSERT_NE(e, 0);
}

// With long rope scaling, the planned length of a request decides how its tokens are rotated. So a
// long and a short request with the same prompt share no cached prefix, and neither changes the
// other in a step.
TEST(LongRopeTest, PlannedLengthDecidesAndSeparatesCachedPrefixes) {
  FamilyCase model;
  for (const FamilyCase& c : FamilyCases()) {
    if (c.name == "phi3-longrope-short") model = c;
  }
  const auto answers = ReadFamilyAnswers(model.folder);
  ASSERT_TRUE(answers.ok()) << answers.status();
  constexpr int kLongFrom = 128;
  const auto request = [&](int planned) {
    Request r;
    r.prompt = answers->tokens;
    r.sampling.max_tokens = planned - static_cast<int>(r.prompt.size());
    r.sampling.temperature = 0.0;
    r.sampling.ignore_eos = true;
    r.sampling.logprobs = 0;
    return r;
  };
  const auto submit = [&](TestEngine& engine, const std::string& id, int planned) {
    Request r = request(planned);
    r.id = id;
    return engine.Submit(r);
  };
  std::vector<std::shared_ptr<CollectingSink>> alone;
  for (const int planned : {kLongFrom, kLongFrom + 1}) {
    auto engine = TestEngine::Start(model.folder, {.max_num_seqs = 1, .prefix_cache = false});
    ASSERT_TRUE(engine.ok()) << engine.status();
    alone.push_back(submit(**engine, "alone", planned));
    ASSERT_TRUE(alone.back()->Wait().ok());
  }
  ASSERT_FALSE(alone[0]->logprobs().empty());
  EXPECT_NE(alone[0]->logprobs()[0].logprob, alone[1]->logprobs()[0].logprob);

  auto engine = TestEngine::Start(model.folder, {.max_num_seqs = 4, .max_step_tokens = 40});
  ASSERT_TRUE(engine.ok()) << engine.status();
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const int planned : {kLongFrom, kLongFrom + 1}) {
      sinks.push_back(submit(**engine, std::to_string(planned), planned));
    }
    for (size_t i = 0; i < sinks.size(); ++i) {
      ASSERT_TRUE(sinks[i]->Wait().ok()) << sinks[i]->Wait();
      EXPECT_EQ(sinks[i]->last().usage.cached_tokens > 0, round == 1) << i;
      EXPECT_EQ(sinks[i]->tokens(), alone[i]->tokens());
      for (size_t t = 0; t < sinks[i]->logprobs().size(); ++t) {
        ASSERT_EQ(sinks[i]->logprobs()[t].logprob, alone[i]->logprobs()[t].logprob)
            << i << ' ' << t;
      }
    }
  }
}

// Where sparse attention would begin, the reason is told: of options, and of requests.
TEST(SparseAttentionEngine, LongerContextsAreRefusedWithTheReason) {
  const std::string reason = "sparse attention beyond index_topk is not computed";
  const std::filesystem::path folder = SourcePath("tests/golden/families/deepseek-v32");
  const auto larger = TestEngine::Start(folder, {.max_model_len = 129}, DType::kF32);
  EXPECT_EQ(larger.status().message(),
            "max-model-len: expected 1 to 128 (" + reason + "), found 129");
  Request request;
  request.id = "r";
  request.prompt.assign(100, 5);
  request.sampling.max_tokens = 29;
  for (const int length : {0, 100}) {
    const auto engine = TestEngine::Start(folder, {.max_model_len = length}, DType::kF32);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const auto sink = (*engine)->Submit(request);
    const std::string error(sink->Wait().message());
    EXPECT_EQ(error.find(reason) != error.npos, length == 0) << error;
    EXPECT_NE(error.find("context length: the limit is"), error.npos) << error;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyEngineTest, ::testing::ValuesIn(FamilyCases()),
                         [](const auto& info) { return TestName(info.param); });

}  // namespace
}  // namespace moeserve::testing

// Several ranks answer as one process does while requests of all kinds come and go, memory is
// short, tokens are drafted, and experts change ranks every third step.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "engine/text/structured/vocabulary_index.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"
#include "tests/support/ranked_engine.h"

namespace moeserve::testing {
namespace {

constexpr int kStormRequests = 18;
constexpr int kStormLength = 96;

class RanksStormTest : public ::testing::TestWithParam<RankedModel> {
 protected:
  using Constraints = std::vector<std::shared_ptr<const CompiledConstraint>>;

  static EngineOptions Options() {
    EngineOptions options;
    options.max_model_len = kStormLength;
    options.routing_records = true;
    options.routing_control = {.enabled = true};
    // The draft layers of such a model propose tokens, too.
    options.draft = {.max_tokens = 3, .always = true};
    return options;
  }

  // Empty if the model has no tokenizer.
  static Constraints Compile(const Engine& engine) {
    if (engine.tokenizer() == nullptr) return {};
    const auto vocabulary =
        VocabularyIndex::Build(*engine.tokenizer(), {0}, engine.spec().vocab_size);
    ConstraintSpec schema, pattern, words;
    schema.kind = ConstraintSpec::Kind::kJsonSchema;
    schema.text = R"({"type": "object", "required": ["a"], "additionalProperties": false,
                      "properties": {"a": {"enum": ["red", "green"]}, "b": {"type": "boolean"}}})";
    pattern.kind = ConstraintSpec::Kind::kRegex;
    pattern.text = "(the (cat|dog) [a-z]{1,6}\\. ){1,3}";
    words.kind = ConstraintSpec::Kind::kChoice;
    words.choices = {"a tree", "a time", "once"};
    Constraints constraints;
    for (const ConstraintSpec& spec : {schema, pattern, words}) {
      auto compiled = CompileConstraint(spec, *vocabulary);
      EXPECT_TRUE(compiled.ok()) << compiled.status();
      if (compiled.ok()) constraints.push_back(*compiled);
    }
    return constraints;
  }

  // The samples of request `i`. Prompts share one of two beginnings, and repeat themselves.
  static std::vector<Request> SamplesOf(int i, const Constraints& constraints) {
    Random random(static_cast<uint64_t>(i) + 1);
    Request r;
    const int length = 18 + random.Below(30);
    for (int t = 0; t < length; ++t) r.prompt.push_back((t % 7 * 5 + (t > 17 ? i : i % 2)) % 40);
    if (GetParam().pair) r.source = r.prompt;
    r.sampling.max_tokens = 4 + random.Below(30);
    r.sampling.temperature = i % 3 == 2 ? 0.9 : 0.0;
    r.sampling.seed = i;
    r.sampling.ignore_eos = true;
    r.sampling.logprobs = 2;
    r.routing_record = i % 2 == 0;
    r.expert_counts = true;
    if (i % 4 == 1 && !constraints.empty()) {
      r.sampling.constraint = constraints[static_cast<size_t>(i / 4) % constraints.size()];
      r.sampling.ignore_eos = false;
    }
    std::vector<Request> samples;
    for (int s = 0; s < (i % 5 == 0 ? 3 : 1); ++s) {
      r.id = std::to_string(i) + "." + std::to_string(s);
      r.sampling.sample_index = s;
      samples.push_back(r);
    }
    return samples;
  }

  static std::vector<std::shared_ptr<CollectingSink>> Submit(TestEngine& engine,
                                                             const std::vector<Request>& samples) {
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    std::vector<std::shared_ptr<TokenSink>> given;
    for (size_t s = 0; s < samples.size(); ++s) {
      sinks.push_back(std::make_shared<CollectingSink>());
      given.push_back(sinks.back());
    }
    const absl::Status accepted = engine.get().Submit(samples, given);
    EXPECT_TRUE(accepted.ok()) << accepted;
    if (!accepted.ok()) sinks.clear();
    return sinks;
  }

  struct Answer {
    std::vector<AnswerBits> bits;
    std::vector<RoutingRecord> records;
  };
  static Answer AnswerOf(const std::vector<std::shared_ptr<CollectingSink>>& sinks) {
    Answer answer;
    for (const auto& sink : sinks) {
      answer.bits.push_back(BitsOf(*sink));
      answer.records.push_back(sink->routing());
    }
    return answer;
  }
  static void ExpectSame(const Answer& found, const Answer& expected) {
    ASSERT_EQ(found.bits.size(), expected.bits.size());
    for (size_t s = 0; s < found.bits.size(); ++s) {
      EXPECT_TRUE(found.bits[s] == expected.bits[s]) << "sample " << s;
      ExpectSameRoutes(found.records[s], expected.records[s], "sample " + std::to_string(s));
    }
  }

  // Sends all requests from several threads, beside others that are cancelled.
  static void Storm(TestEngine& engine, const Constraints& constraints,
                    const std::vector<Answer>& expected) {
    std::atomic<bool> ended = false;
    std::atomic<int> cancelled = 0;
    std::thread canceller([&] {
      for (int i = 0; !ended || cancelled == 0; ++i) {
        const auto sinks = Submit(engine, SamplesOf(1000 + i, constraints));
        for (int yields = 0; yields < i % 50; ++yields) std::this_thread::yield();
        for (const auto& sink : sinks) engine.get().Cancel(sink.get());
        for (const auto& sink : sinks) {
          const absl::Status status = sink->Wait();
          EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
          cancelled += absl::IsCancelled(status);
        }
      }
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::vector<std::vector<std::shared_ptr<CollectingSink>>> sinks;
        for (int i = t; i < kStormRequests; i += 3) {
          sinks.push_back(Submit(engine, SamplesOf(i, constraints)));
        }
        for (size_t n = 0; n < sinks.size(); ++n) {
          const size_t i = static_cast<size_t>(t) + 3 * n;
          SCOPED_TRACE(i);
          ExpectSame(AnswerOf(sinks[n]), expected[i]);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ended = true;
    canceller.join();
    engine.ExpectIdle();
  }
};

TEST_P(RanksStormTest, AnswersAreThoseOfOneProcess) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "experts move on CPUs only";
  EngineOptions options = Options();
  std::vector<Answer> expected;
  {
    const auto engine =
        TestEngine::Start(SourcePath(GetParam().folder), options, GetParam().compute(), "cpu",
                          GetParam().quantization, {}, GetParam().predictions);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const Constraints constraints = Compile((*engine)->get());
    for (int i = 0; i < kStormRequests; ++i) {
      expected.push_back(AnswerOf(Submit(**engine, SamplesOf(i, constraints))));
    }
    options.kv_cache_bytes = (*engine)->BytesFor(2 * kStormLength);
  }
  options.max_num_seqs = 8;
  options.max_step_tokens = 24;
  constexpr SplitChoice kOn = SplitChoice::kOn, kOff = SplitChoice::kOff;
  for (const auto& [ranks, splits] :
       {std::pair(2, Splits{kOff, kOff, kOff}), std::pair(4, Splits{kOn, kOn, kOn})}) {
    SCOPED_TRACE(ranks);
    const auto ranked = RankedEngine::Start(GetParam(), options, ranks,
                                            {.splits = splits, .moves = Moves::kAlways});
    ASSERT_TRUE(ranked->started());
    TestEngine& engine = ranked->engine();
    Storm(engine, Compile(engine.get()), expected);
    const EngineStats stats = engine.get().Stats();
    EXPECT_GT(stats.preemptions, 0u);
    EXPECT_GT(stats.drafted_tokens, 0u);
    EXPECT_TRUE(GetParam().pair || stats.prefix_hit_tokens > 0);
    EXPECT_GE(ranked->placements(), ranked->steps() / 3);
    EXPECT_GT(ranked->placements(), 3);
  }
}

constexpr Quantization kUnquantized = Quantization::kNone;
constexpr RankedModel kStormModels[] = {
    {"smoe", "deploy/models/smoe"},
    {"x_moe_bf16", "deploy/models/x-moe", kUnquantized, false, false, DType::kBF16},
    {"mh_moe_bf16", "deploy/models/mh-moe", kUnquantized, false, false, DType::kBF16},
    {"moa", "deploy/models/moa"},
    {"moa_int8_channel", "deploy/models/moa", Quantization::kInt8Channel},
    {"hmoe_topk_int4_k", "deploy/models/hmoe-topk", Quantization::kInt4K},
    {"hmoe_topp", "deploy/models/hmoe-topp"},
    {"moa_translator", "deploy/models/moa-translator", kUnquantized, false, true},
    {"deepseek_v3_mtp", "tests/golden/families/deepseek-v3-mtp", kUnquantized, true},
    {"gpt_oss_bf16", "tests/golden/families/gpt-oss", kUnquantized, false, false, DType::kBF16},
    {"mixtral", "tests/golden/families/mixtral"},
    {"qwen3_moe", "tests/golden/families/qwen3-moe"},
    {"lfm2_moe", "tests/golden/families/lfm2-moe"}};
INSTANTIATE_TEST_SUITE_P(Models, RanksStormTest, ::testing::ValuesIn(kStormModels),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moeserve::testing

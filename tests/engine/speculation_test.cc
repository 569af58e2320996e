// Drafted tokens and tokens without an alternative change how many steps an output takes, and
// nothing else: tokens, texts, log-probabilities, routing records, usage and expert counts.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine/draft/prompt_lookup.h"
#include "engine/engine.h"
#include "engine/text/structured/compile_constraint.h"
#include "engine/text/structured/vocabulary_index.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

using TokenIds = std::vector<TokenId>;

constexpr int kModelLength = 256;

EngineOptions Options(DraftOptions draft) {
  EngineOptions options;
  options.max_model_len = kModelLength;
  options.max_num_seqs = 16;
  options.routing_records = true;
  options.forced_tokens = draft.max_tokens > 0;
  options.draft = draft;
  return options;
}

constexpr DraftOptions kAlways{.max_tokens = 7, .always = true};

struct Constraints {
  std::shared_ptr<const CompiledConstraint> schema, pattern, words;
};

Constraints Compile(const Engine& engine) {
  const auto vocabulary =
      VocabularyIndex::Build(*engine.tokenizer(), {0}, engine.spec().vocab_size);
  const auto compile = [&](ConstraintSpec::Kind kind, const std::string& text,
                           std::vector<std::string> choices = {}) {
    ConstraintSpec spec;
    spec.kind = kind;
    spec.text = text;
    spec.choices = std::move(choices);
    auto compiled = CompileConstraint(spec, *vocabulary);
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return *compiled;
  };
  using Kind = ConstraintSpec::Kind;
  return {
      .schema = compile(Kind::kJsonSchema,
                        R"({"type": "object",
                              "properties": {"kind": {"enum": ["patriarch", "prophetess"]},
                                             "age": {"type": "integer", "minimum": 0},
                                             "children": {"type": "array", "maxItems": 3,
                                                          "items": {"type": "boolean"}}},
                              "required": ["kind", "age", "children"],
                              "additionalProperties": false})"),
      .pattern = compile(Kind::kRegex, "(In the beginning (was|God) [a-z ]{0,20}\\. ){1,4}"),
      .words = compile(Kind::kChoice, "",
                       {"the Lord spoke unto Moses, saying", "the Lord is with thee", "Behold"})};
}

// Returns request `i`: of every three, one repeats a part of its prompt, so that there is much to
// look up, and all kinds of sampling take turns.
Request MakeRequest(const Golden& golden, const Constraints& constraints, int i) {
  Random random(static_cast<uint64_t>(i));
  Request r;
  r.id = std::to_string(i);
  r.prompt = golden.Prompt(random.Below(golden.prompts));
  r.prompt.resize(static_cast<size_t>(8 + random.Below(golden.length - 8)));
  if (i % 3 == 0) {
    const std::vector<TokenId> half(r.prompt.begin(), r.prompt.begin() + std::ssize(r.prompt) / 2);
    r.prompt.insert(r.prompt.end(), half.begin(), half.end());
  }
  r.routing_record = i % 5 != 0;
  r.expert_counts = i % 4 == 0;
  SamplingParams& p = r.sampling;
  p.max_tokens = 1 + random.Below(60);
  p.seed = i;
  p.temperature = i % 2 == 0 ? 0.0 : 0.3 + 0.7 * random.Uniform();
  p.ignore_eos = i % 7 != 0;
  if (i % 6 == 1) p.logprobs = random.Below(4);
  if (i % 11 == 2) p.prompt_logprobs = 1;
  switch (i % 8) {
    case 1:
      p.top_p = 0.7;
      break;
    case 2:
      p.stop = {" the", "ing"};
      break;
    case 3:
      p.constraint = constraints.schema;
      break;
    case 4:
      p.presence_penalty = 0.7;
      p.repetition_penalty = 1.1;
      p.logit_bias = {{random.Below(100), 3.0f}};
      break;
    case 5:
      p.constraint = i % 16 < 8 ? constraints.pattern : constraints.words;
      p.min_tokens = std::min(p.max_tokens, i % 3);
      break;
    case 6:
      p.bad_words = {{r.prompt[3]}, {r.prompt[4], r.prompt[5]}};
      p.stop_token_ids = {r.prompt[6]};
      break;
    case 7:
      // With i % 16 == 15 there is no choice at all, with i % 32 == 31 none but an error at last.
      p.allowed_token_ids = {r.prompt[1]};
      if (i % 16 == 7) p.allowed_token_ids.push_back(r.prompt[2]);
      if (i % 32 == 31) p.bad_words = {TokenIds(3, r.prompt[1])};
      break;
    default:
      break;
  }
  return r;
}

// What must not depend on drafts.
void ExpectSameOutput(CollectingSink& sink, CollectingSink& plain) {
  EXPECT_EQ(sink.Wait(), plain.Wait());
  EXPECT_EQ(plain.endings(), 1);
  EXPECT_EQ(sink.endings(), 1);
  EXPECT_EQ(sink.tokens(), plain.tokens());
  EXPECT_EQ(sink.text(), plain.text());
  const auto same = [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.token == b.token && a.logprob == b.logprob && a.rank == b.rank && a.top == b.top;
  };
  EXPECT_TRUE(std::equal(sink.logprobs().begin(), sink.logprobs().end(), plain.logprobs().begin(),
                         plain.logprobs().end(), same));
  EXPECT_EQ(sink.prompt_logprobs().size(), plain.prompt_logprobs().size());
  EXPECT_EQ(sink.last().finish_reason, plain.last().finish_reason);
  EXPECT_EQ(sink.last().stop_string, plain.last().stop_string);
  EXPECT_EQ(sink.last().stop_token, plain.last().stop_token);
  const Usage &a = sink.last().usage, &b = plain.last().usage;
  EXPECT_EQ(a.completion_tokens, b.completion_tokens);
  EXPECT_EQ(a.routed_tokens, b.routed_tokens);
  EXPECT_EQ(a.expert_routes, b.expert_routes);
  EXPECT_EQ(a.activated_parameters, b.activated_parameters);
  EXPECT_EQ(sink.last().expert_counts, plain.last().expert_counts);
  if (!plain.Wait().ok()) return;  // routes come with the piece behind their token
  EXPECT_EQ(sink.routing().tokens, plain.routing().tokens);
  EXPECT_EQ(sink.routing().offsets, plain.routing().offsets);
  EXPECT_EQ(sink.routing().experts, plain.routing().experts);
  EXPECT_EQ(sink.routing().weights, plain.routing().weights);
}

// The counters of a block that may not depend on drafts. `visits` counts steps.
auto SameCounters(const BlockExpertStats& b) {
  return std::tuple(b.total_tokens(), b.total_rows(), b.tokens[1], b.selections,
                    b.decode_selections, b.touching_tokens, b.distinct_histogram, b.nonfinite_rows);
}

class SpeculationTest : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(GetParam().golden);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }
  std::unique_ptr<TestEngine> Start(const EngineOptions& options,
                                    const std::filesystem::path& draft_model = {}) {
    auto engine = TestEngine::Start(GetParam().model, options, DType::kF32, TestDevice(),
                                    Quantization::kNone, draft_model);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  Golden golden_;
};

TEST_P(SpeculationTest, OutputsAndCountsAreTheSame) {
  // All four models together run 1,000 requests.
  constexpr int kRequests = 250;
  // Which tokens come from the prefix cache depends on the order in which requests end.
  EngineOptions options = Options({});
  options.prefix_cache = false;
  auto plain = Start(options);
  options.draft = kAlways;
  options.forced_tokens = true;
  auto drafting = Start(options);
  const Constraints constraints = Compile(plain->get());
  std::vector<std::shared_ptr<CollectingSink>> expected, sinks;
  for (int i = 0; i < kRequests; ++i) {
    expected.push_back(plain->Submit(MakeRequest(golden_, constraints, i)));
    sinks.push_back(drafting->Submit(MakeRequest(golden_, constraints, i)));
  }
  for (int i = 0; i < kRequests; ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    EXPECT_EQ(expected[i]->Wait().ok(), i % 32 != 31 || expected[i]->tokens().size() < 2)
        << expected[i]->Wait();
    ExpectSameOutput(*sinks[i], *expected[i]);
  }
  drafting->ExpectIdle();
  const EngineStats stats = drafting->get().Stats();
  EXPECT_GT(stats.accepted_tokens, 100u);
  EXPECT_GT(stats.drafted_tokens, stats.accepted_tokens + 100);
  EXPECT_EQ(plain->get().Stats().drafted_tokens, 0u);

  const ExpertStats a = plain->get().ExpertSnapshot(), b = drafting->get().ExpertSnapshot();
  EXPECT_EQ(a.rejected_tokens, 0u);
  EXPECT_EQ(b.rejected_tokens, stats.drafted_tokens - stats.accepted_tokens);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.diversity_histogram, b.diversity_histogram);
  ASSERT_EQ(a.blocks.size(), b.blocks.size());
  for (size_t i = 0; i < a.blocks.size(); ++i) {
    EXPECT_EQ(SameCounters(a.blocks[i]), SameCounters(b.blocks[i])) << "block " << i;
    EXPECT_EQ(b.blocks[i].rejected_tokens, b.rejected_tokens);
    EXPECT_EQ(b.blocks[i].rejected_rows, b.rejected_tokens * b.blocks[i].split_heads);
    uint64_t rejected = 0;
    for (const uint64_t n : b.blocks[i].rejected_selections) rejected += n;
    EXPECT_GE(rejected, b.blocks[i].rejected_rows);
  }
  const auto table = [](TestEngine& engine) {
    const auto counts = engine.get().token_expert_counts();
    return counts.has_value() ? counts->Columns(0, counts->experts()) : std::vector<uint32_t>();
  };
  EXPECT_EQ(table(*plain), table(*drafting));
}

// A request may bring a text that its response will resemble: the response is the same with a
// right, a wrong and an odd one, and a right one saves steps.
TEST_P(SpeculationTest, PredictionsChangeNothingButTheSteps) {
  EngineOptions options = Options({});
  options.prefix_cache = false;
  auto plain = Start(options);
  options.draft = kAlways;
  auto drafting = Start(options);
  const Constraints constraints = Compile(plain->get());
  uint64_t accepted_alone = 0, accepted = 0;
  for (int i = 0; i < 48; ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    auto expected = plain->Submit(MakeRequest(golden_, constraints, i));
    (void)expected->Wait();
    const auto run = [&](TokenIds prediction) {
      Request r = MakeRequest(golden_, constraints, i);
      r.prediction = std::move(prediction);
      const uint64_t before = drafting->get().Stats().accepted_tokens;
      auto sink = drafting->Submit(r);
      ExpectSameOutput(*sink, *expected);
      return drafting->get().Stats().accepted_tokens - before;
    };
    accepted_alone += run({});
    accepted += run(expected->tokens());
    (void)run({5});
    (void)run(golden_.Prompt(0));
  }
  EXPECT_GT(accepted, accepted_alone + 200);
  Request wrong = MakeRequest(golden_, constraints, 0);
  wrong.prediction = {-1};
  EXPECT_TRUE(absl::IsInvalidArgument(drafting->Submit(wrong)->Wait()));
  wrong.prediction.assign(static_cast<size_t>(drafting->get().max_model_len()) + 1, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(drafting->Submit(wrong)->Wait()));
}

// Little memory, so that sequences are preempted between drafts, cancellations, and prompts in
// pieces beside drafts.
TEST_P(SpeculationTest, PreemptionsAndCancellationsChangeNothing) {
  EngineOptions options = Options({});
  auto plain = Start(options);
  options.draft = kAlways;
  options.forced_tokens = true;
  options.kv_cache_bytes = plain->BytesFor(kModelLength) * 2;
  options.max_prompt_rows = 24;
  auto drafting = Start(options);
  const Constraints constraints = Compile(plain->get());
  constexpr int kRequests = 48;
  std::vector<std::shared_ptr<CollectingSink>> expected, sinks;
  for (int i = 0; i < kRequests; ++i) {
    Request r = MakeRequest(golden_, constraints, i);
    r.expert_counts = r.routing_record = false;  // preempted sequences reuse what they published
    expected.push_back(plain->Submit(r));
    sinks.push_back(drafting->Submit(std::move(r)));
  }
  for (int i = 0; i < kRequests; i += 3) {
    (void)expected[i]->Wait();
    drafting->get().Cancel(sinks[i].get());
  }
  for (int i = 0; i < kRequests; ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    const absl::Status status = sinks[i]->Wait();
    if (absl::IsCancelled(status)) {
      const auto& tokens = sinks[i]->tokens();
      ASSERT_LE(tokens.size(), expected[i]->tokens().size());
      EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), expected[i]->tokens().begin()));
    } else {
      ExpectSameOutput(*sinks[i], *expected[i]);
    }
  }
  EXPECT_GT(drafting->get().Stats().drafted_tokens, 0u);
  drafting->ExpectIdle();
}

// Another model drafts the tokens, with little memory and with enough of it, and however many it
// drafts. It was trained on the same texts, so it is often right.
TEST_P(SpeculationTest, ADraftModelChangesNothing) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "draft models run on the CPU only";
  auto plain = Start(Options({}));
  const Constraints constraints = Compile(plain->get());
  constexpr int kRequests = 64;
  std::vector<std::shared_ptr<CollectingSink>> expected;
  const auto request = [&](int i) {
    Request r = MakeRequest(golden_, constraints, i);
    r.expert_counts = r.routing_record = false;  // which prefixes are in the cache depends on time
    return r;
  };
  for (int i = 0; i < kRequests; ++i) expected.push_back(plain->Submit(request(i)));
  for (const int64_t sequences : {2, 16}) {
    for (const bool always : {true, false}) {
      EngineOptions options = Options({.max_tokens = 5, .always = always});
      options.max_prompt_rows = 20;
      options.max_step_tokens = 48;  // the draft model takes several steps to read the prompts
      options.kv_cache_bytes = 2 * sequences * plain->BytesFor(kModelLength);
      auto drafting = Start(options, SourcePath("deploy/models/dense"));
      std::vector<std::shared_ptr<CollectingSink>> sinks;
      for (int i = 0; i < kRequests; ++i) sinks.push_back(drafting->Submit(request(i)));
      for (int i = 0; i < kRequests; ++i) {
        SCOPED_TRACE("request " + std::to_string(i));
        ExpectSameOutput(*sinks[i], *expected[i]);
      }
      const EngineStats stats = drafting->get().Stats();
      if (always) {
        EXPECT_GT(stats.accepted_tokens, 100u);
        EXPECT_GT(stats.drafted_tokens, stats.accepted_tokens + 100);
      }
      EXPECT_EQ(drafting->get().ExpertSnapshot().rejected_tokens,
                stats.drafted_tokens - stats.accepted_tokens);
      drafting->ExpectIdle();
    }
  }
}

// Returns the ranks of the tokens of `output` by probability.
std::vector<int> Ranks(TestEngine& engine, const TokenIds& prompt, const TokenIds& output) {
  Request r;
  r.id = "ranks";
  r.prompt = prompt;
  r.prompt.insert(r.prompt.end(), output.begin(), output.end());
  r.sampling.max_tokens = 0;
  r.sampling.prompt_logprobs = 0;
  auto sink = engine.Submit(std::move(r));
  EXPECT_TRUE(sink->Wait().ok()) << sink->Wait();
  std::vector<int> ranks;
  for (size_t i = prompt.size(); i < sink->prompt_logprobs().size(); ++i) {
    ranks.push_back(sink->prompt_logprobs()[i]->rank);
  }
  return ranks;
}

struct DraftCounts {
  uint64_t drafted = 0;
  uint64_t accepted = 0;
};

// Returns how many tokens are drafted and accepted if the model drafts for itself, as the ranks of
// the drawn tokens say.
DraftCounts CountsByRank(TestEngine& engine, const TokenIds& prompt, const TokenIds& output,
                         const DraftOptions& draft) {
  const std::vector<int> ranks = Ranks(engine, prompt, output);
  TokenIds text = prompt;
  text.insert(text.end(), output.begin(), output.end());
  DraftCounts counts;
  const auto tokens = static_cast<int>(output.size());
  for (int at = 1; at < tokens; ++at) {  // no token is drafted before the first one is drawn
    int most = std::min(draft.max_tokens, tokens - at - 1);
    const auto known =
        std::span<const TokenId>(text).first(prompt.size() + static_cast<size_t>(at));
    const Proposal found = draft.prompt_lookup ? LookUp(known, most) : Proposal{};
    // The model is not asked while samples share a block, which is before the second token.
    const bool by_model = at > 1 && found.matched < 4;
    if (!by_model) most = static_cast<int>(found.tokens.size());
    counts.drafted += static_cast<uint64_t>(most);
    for (int k = 0; k < most; ++k, ++at) {
      const auto i = static_cast<size_t>(at);
      if (by_model ? ranks[i] != 0 : found.tokens[static_cast<size_t>(k)] != output[i]) break;
      ++counts.accepted;
    }
  }
  return counts;
}

// The draft model's cache must have what it should have after wrong drafts, after steps in which
// the model is not asked, and in blocks that several sequences share.
TEST_P(SpeculationTest, AModelDraftsItsOwnMostProbableTokens) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "draft models run on the CPU only";
  auto plain = Start(Options({}));
  for (const bool lookup : {false, true}) {
    const DraftOptions draft{.max_tokens = 3, .prompt_lookup = lookup, .always = true};
    auto drafting = Start(Options(draft), GetParam().model);
    DraftCounts expected;
    for (int i = 0; i < 6; ++i) {
      std::vector<Request> requests;
      std::vector<std::shared_ptr<CollectingSink>> sinks;
      std::vector<std::shared_ptr<TokenSink>> targets;
      for (int k = 0; k < 4; ++k) {
        Request r;
        r.id = std::to_string(k);
        r.prompt = golden_.Prompt(i);
        r.prompt.resize(21);
        r.sampling.seed = i;
        r.sampling.sample_index = k;
        r.sampling.max_tokens = 60;
        r.sampling.ignore_eos = true;
        r.sampling.temperature = lookup ? 0.35 : 0.8;
        requests.push_back(std::move(r));
        sinks.push_back(std::make_shared<CollectingSink>());
        targets.push_back(sinks.back());
      }
      const TokenIds prompt = requests[0].prompt;
      ASSERT_TRUE(drafting->get().Submit(std::move(requests), std::move(targets)).ok());
      for (const auto& sink : sinks) {
        ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
        const DraftCounts counts = CountsByRank(*plain, prompt, sink->tokens(), draft);
        expected.drafted += counts.drafted;
        expected.accepted += counts.accepted;
      }
    }
    drafting->ExpectIdle();
    const EngineStats stats = drafting->get().Stats();
    EXPECT_EQ(stats.drafted_tokens, expected.drafted);
    EXPECT_EQ(stats.accepted_tokens, expected.accepted);
    EXPECT_GT(expected.accepted, 100u);
    EXPECT_GT(expected.drafted, expected.accepted + 100);
  }
}

// A preempted sequence gets other blocks, in which the draft model has computed nothing.
TEST_P(SpeculationTest, AModelThatDraftsForItselfIsRightAfterPreemptions) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "draft models run on the CPU only";
  EngineOptions options = Options({.max_tokens = 3, .prompt_lookup = false, .always = true});
  options.max_model_len = 96;
  options.prefix_cache = false;
  const int64_t bytes = Start(options)->BytesFor(96);
  options.kv_cache_bytes = 2 * 3 * bytes;  // of both models
  auto drafting = Start(options, GetParam().model);
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 8; ++i) {
    Request r;
    r.id = std::to_string(i);
    r.prompt = golden_.Prompt(i);
    r.prompt.resize(16);
    r.sampling.max_tokens = 70;
    r.sampling.ignore_eos = true;
    r.sampling.temperature = 0.0;
    sinks.push_back(drafting->Submit(std::move(r)));
  }
  for (const auto& sink : sinks) ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
  drafting->ExpectIdle();
  const EngineStats stats = drafting->get().Stats();
  EXPECT_GT(stats.preemptions, 0u);
  EXPECT_GT(stats.drafted_tokens, 200u);
  EXPECT_EQ(stats.accepted_tokens, stats.drafted_tokens);
}

// Keys and punctuation come back in every answer by the same schema.
TEST_P(SpeculationTest, AnswersByASchemaTeachTheNext) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "the host draws these tokens on every device";
  EngineOptions options = Options({.max_tokens = 8, .prompt_lookup = false, .always = true});
  auto drafting = Start(options);
  const Constraints constraints = Compile(drafting->get());
  std::vector<uint64_t> accepted;
  for (int i = 0; i < 5; ++i) {
    Request r;
    r.id = std::to_string(i);
    r.prompt = golden_.Prompt(0);
    r.sampling.max_tokens = 60;
    r.sampling.temperature = 0.0;
    r.sampling.constraint = constraints.schema;
    if (i == 4) r.cache_salt = "another user";
    auto sink = drafting->Submit(std::move(r));
    ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
    accepted.push_back(drafting->get().Stats().accepted_tokens);
  }
  // The output is the same each time, so whatever varied not within it is right.
  EXPECT_GT(accepted[1] - accepted[0], accepted[0] + 3);
  EXPECT_GE(accepted[3] - accepted[2], accepted[1] - accepted[0]);
  EXPECT_EQ(accepted[4] - accepted[3], accepted[0]) << "others' answers are not used";
}

// A device draws the tokens of drafted rows itself, and counts the experts after that.
TEST_P(SpeculationTest, ADeviceVerifiesDrafts) {
  auto plain = Start(Options({}));
  auto drafting = Start(Options({.max_tokens = 3, .always = true}));
  for (int i = 0; i < 3; ++i) {
    Request r = MakeRequest(golden_, {}, 8 * i);
    r.prompt.resize(12);
    for (size_t t = 6; t < 12; ++t) r.prompt[t] = r.prompt[t - 6];
    r.sampling.max_tokens = i == 0 ? 12 : 30;
    // Two tokens at most to draw from, so that drawn tokens often follow a draft that was right.
    r.sampling.temperature = i == 0 ? 0.0 : 1.0;
    r.sampling.top_k = 2;
    auto expected = plain->Submit(r);
    ASSERT_TRUE(expected->Wait().ok()) << expected->Wait();
    ExpectSameOutput(*drafting->Submit(std::move(r)), *expected);
  }
  const EngineStats stats = drafting->get().Stats();
  EXPECT_GT(stats.drafted_tokens, 0u);
  EXPECT_EQ(drafting->get().ExpertSnapshot().rejected_tokens,
            stats.drafted_tokens - stats.accepted_tokens);
  EXPECT_EQ(drafting->get().ExpertSnapshot().tokens, plain->get().ExpertSnapshot().tokens);
}

// The choice of how much is computed depends on time; outputs may not.
TEST_P(SpeculationTest, TheNumberOfDraftsDoesNotMatter) {
  auto plain = Start(Options({}));
  const Constraints constraints = Compile(plain->get());
  for (const DraftOptions draft : {DraftOptions{.max_tokens = 1, .always = true},
                                   DraftOptions{.max_tokens = kMostDraftTokens, .always = true},
                                   DraftOptions{.max_tokens = 8}}) {
    auto drafting = Start(Options(draft));
    for (int i = 0; i < 24; ++i) {
      SCOPED_TRACE("request " + std::to_string(i));
      // One after the other, so that nothing but the request itself fills the prefix cache.
      auto expected = plain->Submit(MakeRequest(golden_, constraints, i));
      ExpectSameOutput(*drafting->Submit(MakeRequest(golden_, constraints, i)), *expected);
    }
    EXPECT_EQ(plain->get().Stats().drafted_tokens, 0u);
  }
}

std::vector<GoldenModel> TrainedModels() {
  std::vector<GoldenModel> models;
  for (const GoldenModel& m : GoldenModels()) {
    for (const char* name : {"mh-moe", "x-moe", "moa", "hmoe-topp"}) {
      if (m.name == name) models.push_back(m);
    }
  }
  return models;
}

INSTANTIATE_TEST_SUITE_P(Models, SpeculationTest, ::testing::ValuesIn(TrainedModels()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing

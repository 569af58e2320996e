// The engine: results independent of other requests, limits, cancellation, accounting.

#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/time/clock.h"
#include "base/steady_clock.h"
#include "engine/run/engine_options.h"
#include "engine/sample/sampler.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/devices.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

Request Prompt(const std::string& id, std::vector<TokenId> tokens, int max_tokens) {
  Request r;
  r.id = id;
  r.prompt = std::move(tokens);
  r.sampling.max_tokens = max_tokens;
  r.sampling.temperature = 0.0;
  r.sampling.ignore_eos = true;
  return r;
}

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto golden =
        ReadGolden(SourcePath("tests/golden/tiny-moa-groups-split-cosine/golden.safetensors"));
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }
  // Starts an engine with a tiny model in which every layer has routed attention and a routed
  // feed-forward.
  std::unique_ptr<TestEngine> Start(const EngineOptions& options = {},
                                    DType compute = DType::kF32) {
    EngineOptions o = options;
    o.routing_records = true;
    auto engine =
        TestEngine::Start(SourcePath("tests/golden/tiny-moa-groups-split-cosine"), o, compute);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  Golden golden_;
};

TEST_F(EngineTest, GreedyEqualsTheReference) {
  auto engine = Start();
  for (int p = 0; p < golden_.prompts; ++p) {
    auto sink = engine->Submit(Prompt(std::to_string(p), golden_.Prompt(p), golden_.length));
    ASSERT_TRUE(sink->Wait().ok());
    for (int i = 0; i < golden_.length; ++i) {
      const int64_t at = int64_t{p} * golden_.length + i;
      if (golden_.greedy_margin[at] < 1e-4) break;
      ASSERT_EQ(sink->tokens()[i], golden_.greedy[at]) << "prompt " << p << ", token " << i;
    }
    EXPECT_EQ(sink->last().finish_reason, FinishReason::kLength);
    EXPECT_EQ(sink->last().usage.prompt_tokens, golden_.length);
    EXPECT_EQ(sink->last().usage.completion_tokens, golden_.length);
  }
}

TEST_F(EngineTest, PromptLogprobsEqualTheReference) {
  // Small steps run the prompt in several parts.
  auto engine = Start({.max_num_seqs = 4, .max_step_tokens = 7});
  Request r = Prompt("a", golden_.Prompt(0), 1);
  r.sampling.prompt_logprobs = 3;
  r.sampling.logprobs = 2;
  auto sink = engine->Submit(std::move(r));
  ASSERT_TRUE(sink->Wait().ok());
  const auto& logprobs = sink->prompt_logprobs();
  ASSERT_EQ(static_cast<int>(logprobs.size()), golden_.length);
  EXPECT_FALSE(logprobs[0].has_value());
  for (int i = 1; i < golden_.length; ++i) {
    ASSERT_TRUE(logprobs[i].has_value());
    EXPECT_NEAR(logprobs[i]->logprob, golden_.target_logprobs[i - 1], 1e-4);
    ASSERT_EQ(logprobs[i]->top.size(), 3u);
    EXPECT_NEAR(logprobs[i]->top[0].second,
                golden_.top_logprobs[static_cast<int64_t>(i - 1) * golden_.top], 1e-4);
  }
  ASSERT_EQ(sink->logprobs().size(), 1u);
  EXPECT_EQ(sink->logprobs()[0].rank, 0);
  EXPECT_EQ(sink->logprobs()[0].top[0].first, sink->tokens()[0]);
  EXPECT_EQ(sink->logprobs()[0].top[0].second, sink->logprobs()[0].logprob);
}

TEST_F(EngineTest, MaxTokensZeroRunsThePromptOnly) {
  auto engine = Start();
  Request r = Prompt("a", golden_.Prompt(1), 0);
  r.sampling.prompt_logprobs = 0;
  auto sink = engine->Submit(std::move(r));
  ASSERT_TRUE(sink->Wait().ok());
  EXPECT_TRUE(sink->tokens().empty());
  EXPECT_EQ(static_cast<int>(sink->prompt_logprobs().size()), golden_.length);
  EXPECT_EQ(engine->get().ExpertSnapshot().tokens, static_cast<uint64_t>(golden_.length));
}

// The parts of a response that a client receives.
struct Answer {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  std::vector<float> prompt_logprobs;
  std::vector<uint64_t> expert_counts;
  friend bool operator==(const Answer&, const Answer&) = default;
};

Answer AnswerOf(const CollectingSink& sink) {
  Answer answer{sink.tokens(), {}, {}, sink.last().expert_counts};
  for (const TokenLogprob& l : sink.logprobs()) answer.logprobs.push_back(l.logprob);
  for (const auto& l : sink.prompt_logprobs()) {
    answer.prompt_logprobs.push_back(l.has_value() ? l->logprob : 1.0f);
  }
  return answer;
}

// Returns request number i of a mix: greedy and seeded, of all lengths, with penalties and masks,
// some with a common prefix.
Request MixedRequest(const Golden& golden, int i) {
  Random random(static_cast<uint64_t>(i));
  std::vector<TokenId> prompt = golden.Prompt(i % golden.prompts);
  if (i % 3 == 0) prompt = golden.Prompt(0);  // many requests share this prefix
  prompt.resize(static_cast<size_t>(1 + random.Below(60)));
  Request r = Prompt(std::to_string(i), prompt, 1 + random.Below(40));
  SamplingParams& p = r.sampling;
  if (i % 2 == 1) {
    p.temperature = 0.8;
    p.top_p = 0.9;
    p.top_k = 40;
    p.seed = i * 7;
  }
  if (i % 5 == 0) p.repetition_penalty = 1.3;
  if (i % 5 == 1) p.presence_penalty = 0.5;
  if (i % 5 == 2) p.frequency_penalty = -0.4;
  if (i % 7 == 0) p.bad_words = {{3}, {5, 4}};
  if (i % 11 == 0) p.prompt_logprobs = 1;
  p.logprobs = 1;
  r.expert_counts = true;
  return r;
}

// Tokens, log-probabilities and expert counts of a request must be the same alone and together with
// many requests, for any limit on prompt rows per step, with and without prefix cache, and with
// preemption.
TEST_F(EngineTest, AnswersDoNotDependOnCompany) {
  // The emulated device is about a thousand times slower than the host.
  const bool emulated = TestDevice() == "cuda_emulated";
  const int requests = emulated ? 16 : 200;
  struct Types {
    DType compute;
    std::optional<KvCacheType> cache;
  };
  const std::vector<Types> types = {
      {DType::kF32, {}}, {DType::kBF16, {}}, {DType::kBF16, KvCacheType::kInt8}};
  for (const auto& [compute, cache] : types) {
    std::vector<Answer> alone;
    {
      auto engine = Start({.kv_cache_type = cache, .prefix_cache = false}, compute);
      for (int i = 0; i < requests; ++i) {
        auto sink = engine->Submit(MixedRequest(golden_, i));
        ASSERT_TRUE(sink->Wait().ok());
        alone.push_back(AnswerOf(*sink));
        ASSERT_FALSE(alone.back().expert_counts.empty());
      }
    }
    const int64_t one_sequence =
        Start({.max_model_len = 112, .kv_cache_type = cache}, compute)->BytesFor(112);
    struct Company {
      EngineOptions options;
      bool preempts = false;
    };
    const std::vector<Company> companies = {
        {{.max_num_seqs = 16, .max_prompt_rows = 16, .prefix_cache = false}},
        {{.max_num_seqs = 16, .max_prompt_rows = 64}},
        {{.max_num_seqs = 64, .max_prompt_rows = 512}},
        {{.max_num_seqs = 40, .max_step_tokens = 48}},
        {{.max_model_len = 112, .max_num_seqs = 32, .kv_cache_bytes = 2 * one_sequence}, true},
        {{.max_model_len = 112,
          .max_num_seqs = 32,
          .kv_cache_bytes = 3 * one_sequence,
          .max_prompt_rows = 16,
          .prefix_cache = false},
         true}};
    for (size_t c = 0; c < companies.size(); ++c) {
      if (emulated && c % 2 == 1) continue;
      EngineOptions options = companies[c].options;
      options.kv_cache_type = cache;
      auto engine = Start(options, compute);
      std::vector<std::shared_ptr<CollectingSink>> sinks;
      for (int i = 0; i < requests; ++i) sinks.push_back(engine->Submit(MixedRequest(golden_, i)));
      for (int i = 0; i < requests; ++i) {
        ASSERT_TRUE(sinks[i]->Wait().ok()) << sinks[i]->Wait();
        ASSERT_TRUE(AnswerOf(*sinks[i]) == alone[i]) << "company " << c << ", request " << i;
      }
      engine->ExpectIdle();
      const EngineStats stats = engine->get().Stats();
      EXPECT_TRUE(stats.preemptions > 0 || !companies[c].preempts) << "company " << c;
      if (emulated) continue;  // too few requests to find a cached prefix
      EXPECT_EQ(stats.prefix_hit_tokens > 0, companies[c].options.prefix_cache) << "company " << c;
    }
  }
}

// Samples of one prompt must equal the same requests run one by one, and the prompt must run once.
TEST_F(EngineTest, SamplesShareTheirPrompt) {
  constexpr int kSamples = 12;
  const auto make = [&](int i) {
    std::vector<TokenId> prompt = golden_.Prompt(0);
    prompt.resize(37);  // ends inside a cache block
    Request r = Prompt(std::to_string(i), prompt, 20);
    r.sampling.temperature = 1.0;
    r.sampling.seed = 5;
    r.sampling.sample_index = i;
    r.sampling.logprobs = 0;
    r.sampling.prompt_logprobs = 0;
    r.expert_counts = true;
    return r;
  };
  std::vector<Answer> alone;
  {
    auto engine = Start({.prefix_cache = false});
    for (int i = 0; i < kSamples; ++i) {
      auto sink = engine->Submit(make(i));
      ASSERT_TRUE(sink->Wait().ok());
      alone.push_back(AnswerOf(*sink));
    }
    EXPECT_NE(alone[0].tokens, alone[1].tokens);
  }
  const int64_t one_sequence = Start({.max_model_len = 112})->BytesFor(112);
  for (const EngineOptions& options :
       {EngineOptions{.prefix_cache = false}, EngineOptions{.max_num_seqs = 5},
        EngineOptions{.max_model_len = 112, .kv_cache_bytes = 2 * one_sequence}}) {
    auto engine = Start(options);
    std::vector<Request> requests;
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    std::vector<std::shared_ptr<TokenSink>> plain;
    for (int i = 0; i < kSamples; ++i) {
      requests.push_back(make(i));
      sinks.push_back(std::make_shared<CollectingSink>());
      plain.push_back(sinks.back());
    }
    ASSERT_TRUE(engine->get().Submit(std::move(requests), std::move(plain)).ok());
    for (int i = 0; i < kSamples; ++i) {
      ASSERT_TRUE(sinks[i]->Wait().ok());
      EXPECT_TRUE(AnswerOf(*sinks[i]) == alone[i]) << i;
    }
    engine->ExpectIdle();
    if (!options.prefix_cache) {
      EXPECT_EQ(engine->get().ExpertSnapshot().tokens, 37u + kSamples * 19u);
    }
  }
}

// Whichever sample is cancelled, the other samples must complete.
TEST_F(EngineTest, ACancelledSampleLeavesTheOthers) {
  for (int gone = 0; gone < 3; ++gone) {
    auto engine = Start({.max_prompt_rows = 1});
    // This request keeps the prompt of the group running for a while.
    auto other = engine->Submit(Prompt("other", golden_.Prompt(1), 60));
    std::vector<Request> requests;
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    std::vector<std::shared_ptr<TokenSink>> plain;
    for (int i = 0; i < 3; ++i) {
      requests.push_back(Prompt(std::to_string(i), golden_.Prompt(0), 30));
      sinks.push_back(std::make_shared<CollectingSink>());
      plain.push_back(sinks.back());
    }
    ASSERT_TRUE(engine->get().Submit(std::move(requests), std::move(plain)).ok());
    engine->get().Cancel(sinks[gone].get());
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = sinks[i]->Wait();
      EXPECT_TRUE(status.ok() || (i == gone && absl::IsCancelled(status))) << status;
      EXPECT_TRUE(!status.ok() || sinks[i]->tokens().size() == 30u);
    }
    ASSERT_TRUE(other->Wait().ok());
    engine->ExpectIdle();
  }
}

TEST_F(EngineTest, ThePrefixCacheKeepsSaltsApart) {
  auto engine = Start();
  const auto cached = [&](const std::string& id, const std::string& salt) {
    Request r = Prompt(id, golden_.Prompt(0), 2);
    r.cache_salt = salt;
    auto sink = engine->Submit(std::move(r));
    EXPECT_TRUE(sink->Wait().ok());
    return sink->last().usage.cached_tokens;
  };
  EXPECT_EQ(cached("1", ""), 0);
  EXPECT_EQ(cached("2", ""), 48);  // of 64 tokens: the last one is never taken from the cache
  EXPECT_EQ(cached("3", "a"), 0);
  EXPECT_EQ(cached("4", "a"), 48);
  EXPECT_EQ(cached("5", "b"), 0);
}

TEST_F(EngineTest, MinTokensAndMasksHold) {
  auto engine = Start();
  Request r = Prompt("a", golden_.Prompt(0), 30);
  r.sampling.temperature = 1.0;
  r.sampling.seed = 3;
  r.sampling.allowed_token_ids = {7, 8, 9};
  r.sampling.stop_token_ids = {7, 8};
  r.sampling.min_tokens = 12;
  auto sink = engine->Submit(r);
  ASSERT_TRUE(sink->Wait().ok());
  ASSERT_GT(sink->tokens().size(), 12u);
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(sink->tokens()[i], 9);
  // If masks leave no token, the request must fail.
  r.id = "b";
  r.sampling.bad_words = {{9}};
  EXPECT_TRUE(absl::IsInvalidArgument(engine->Submit(r)->Wait()));
  engine->ExpectIdle();
}

// Blocks the engine from the first token on until GoOn() is called.
class HoldingSink : public TokenSink {
 public:
  void OnDelta(OutputDelta) override {
    holds_ = true;
    holds_.notify_all();
    go_on_.wait(false);
  }
  void OnError(const absl::Status&) override {}
  void WaitForToken() const { holds_.wait(false); }
  void GoOn() {
    go_on_ = true;
    go_on_.notify_all();
  }

 private:
  std::atomic<bool> holds_{false};
  std::atomic<bool> go_on_{false};
};

// Requests with lower priority numbers run first. A priority of p is worth p * kPriorityUnit of
// waiting time, so a request with a high number does not wait forever.
TEST_F(EngineTest, LowerPriorityGoesFirst) {
  auto engine = Start({.max_num_seqs = 1});
  auto holding = std::make_shared<HoldingSink>();
  ASSERT_TRUE(engine->get().Submit(Prompt("holding", golden_.Prompt(0), 2), holding).ok());
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int priority : {5, 0, -5}) {
    Request r = Prompt("p" + std::to_string(priority), golden_.Prompt(1), 8);
    r.priority = priority;
    sinks.push_back(engine->Submit(std::move(r)));
  }
  holding->GoOn();
  for (const auto& s : sinks) ASSERT_TRUE(s->Wait().ok());
  EXPECT_LT(sinks[2]->ended_at(), sinks[1]->ended_at());
  EXPECT_LT(sinks[1]->ended_at(), sinks[0]->ended_at());
}

// The number of rows is split heads * tokens. With top-k there are k * rows selections; with top-p,
// between rows and max * rows. The last sampled token of a request is never run.
TEST_F(EngineTest, ExpertCountsFollowFromTheTokens) {
  auto engine = Start();
  uint64_t expected = 0;
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 10; ++i) {
    std::vector<TokenId> prompt = golden_.Prompt(i % golden_.prompts);
    prompt.resize(static_cast<size_t>(5 + i));
    expected += prompt.size() + 3;
    sinks.push_back(engine->Submit(Prompt(std::to_string(i), prompt, 4)));
  }
  for (const auto& s : sinks) ASSERT_TRUE(s->Wait().ok());
  const ExpertStats stats = engine->get().ExpertSnapshot();
  EXPECT_EQ(stats.tokens, expected);
  engine->get().Shutdown();  // after this, the last step has been counted
  EXPECT_EQ(stats.steps, engine->get().Stats().steps);
  ASSERT_FALSE(stats.blocks.empty());
  for (const BlockExpertStats& b : stats.blocks) {
    EXPECT_EQ(b.total_tokens(), expected);
    EXPECT_EQ(b.total_rows(), expected * b.split_heads);
    uint64_t selections = 0, distinct = 0;
    for (uint64_t n : b.selections) selections += n;
    for (uint64_t n : b.distinct_histogram) distinct += n;
    EXPECT_EQ(distinct, expected);
    if (b.select == SelectKind::kTopK) {
      EXPECT_EQ(selections, b.total_rows() * b.max_selected);
    } else {
      EXPECT_GE(selections, b.total_rows());
      EXPECT_LE(selections, b.total_rows() * b.max_selected);
    }
    EXPECT_EQ(b.nonfinite_rows, 0u);
    // A step visits an expert at most once, and an expert that was selected was visited.
    for (int e = 0; e < b.num_experts; ++e) {
      EXPECT_LE(b.visits[e], stats.steps);
      EXPECT_LE(b.visits[e], b.selections[e]);
      EXPECT_EQ(b.visits[e] == 0, b.selections[e] == 0);
    }
  }
  EXPECT_GT(MeanActivatedParameters(stats), static_cast<double>(stats.always_active_parameters));
}

TEST_F(EngineTest, RefusesWhatCannotRun) {
  auto engine = Start({.max_model_len = 100});
  const auto code = [&](Request r) {
    return engine->get().Submit(std::move(r), std::make_shared<CollectingSink>()).code();
  };
  EXPECT_EQ(code(Prompt("a", {}, 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Prompt("a", {-1}, 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Prompt("a", {engine->get().spec().vocab_size}, 1)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Prompt("a", std::vector<TokenId>(90, 1), 11)), absl::StatusCode::kInvalidArgument);
  Request r = Prompt("a", {1}, 1);
  r.sampling.top_p = -0.1;
  EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument);
  r.sampling.top_p = 1.0;
  r.sampling.temperature = NAN;
  EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument);
  r.sampling.temperature = 0.0;
  r.sampling.stop = {"x"};  // this model has no tokenizer, so stop strings are refused
  EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Prompt("a", std::vector<TokenId>(90, 1), 10)), absl::StatusCode::kOk);
}

// One scale for all elements of a key would lose those that XPOS makes small.
TEST(EngineOptionsTest, XposNeedsACacheOfFloats) {
  ModelSpec spec;
  spec.max_position_embeddings = 64;
  spec.AddLayers(1);
  EngineOptions options;
  options.kv_cache_type = KvCacheType::kInt8;
  EXPECT_TRUE(Resolved(options, spec, 16, 0, 0).ok());
  spec.position.xpos_base = 512.0;
  const absl::Status refused = Resolved(options, spec, 16, 0, 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("kv-cache-dtype: expected f32 or bf16, found int8"),
            std::string::npos);
  for (const KvCacheType type : {KvCacheType::kF32, KvCacheType::kBF16}) {
    options.kv_cache_type = type;
    EXPECT_TRUE(Resolved(options, spec, 16, 0, 0).ok()) << Name(type);
  }
}

TEST_F(EngineTest, ABoundedQueueRefusesAndCancelFreesEverything) {
  auto engine = Start({.max_num_seqs = 1, .max_queued_seqs = 3});
  auto holding = std::make_shared<HoldingSink>();  // keeps any request from ending meanwhile
  ASSERT_TRUE(engine->get().Submit(Prompt("holding", golden_.Prompt(0), 90), holding).ok());
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  absl::Status refused = engine->get().Submit(Prompt("holding", golden_.Prompt(0), 1),
                                              std::make_shared<CollectingSink>());
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  refused = absl::OkStatus();
  for (int i = 0; i < 50 && refused.ok(); ++i) {
    auto sink = std::make_shared<CollectingSink>();
    refused = engine->get().Submit(Prompt(std::to_string(i), golden_.Prompt(0), 90), sink);
    if (refused.ok()) sinks.push_back(sink);
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  ASSERT_GE(sinks.size(), 2u);
  EXPECT_LE(sinks.size(), 3u);
  engine->get().Cancel(sinks[1].get());
  engine->get().Cancel(holding.get());
  holding->GoOn();
  EXPECT_TRUE(absl::IsCancelled(sinks[1]->Wait()));
  for (const auto& s : sinks) engine->get().Cancel(s.get());
  for (const auto& s : sinks) {
    const absl::Status status = s->Wait();
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  }
  engine->ExpectIdle();
  // A request whose deadline has passed ends without running.
  Request late = Prompt("late", golden_.Prompt(0), 10);
  late.deadline = SteadyNow() - absl::Seconds(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine->Submit(late)->Wait()));
}

// Holds the engine at its first piece until the time of the request has passed.
class LateSink : public CollectingSink {
 public:
  explicit LateSink(absl::Time deadline) : deadline_(deadline) {}
  void OnDelta(OutputDelta delta) override {
    CollectingSink::OnDelta(std::move(delta));
    absl::SleepFor(deadline_ - SteadyNow() + absl::Milliseconds(1));
  }

 private:
  const absl::Time deadline_;
};

TEST_F(EngineTest, ADeadlineCutsTheResponse) {
  auto engine = Start({.routing_records = true});
  auto whole = engine->Submit(Prompt("whole", golden_.Prompt(0), 20));
  ASSERT_TRUE(whole->Wait().ok());
  Request late = Prompt("late", golden_.Prompt(0), 20);
  late.routing_record = true;
  late.deadline = SteadyNow() + absl::Milliseconds(300);
  auto sink = std::make_shared<LateSink>(late.deadline);
  ASSERT_TRUE(engine->get().Submit(late, sink).ok());
  ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
  EXPECT_TRUE(sink->last().finished);
  EXPECT_TRUE(sink->last().timed_out);
  EXPECT_EQ(sink->last().finish_reason, FinishReason::kLength);
  const std::vector<TokenId>& tokens = sink->tokens();
  ASSERT_GE(tokens.size(), 1u);
  ASSERT_LT(tokens.size(), 20u);
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), whole->tokens().begin()));
  EXPECT_EQ(sink->last().usage.completion_tokens, static_cast<int>(tokens.size()));
  // The last token was never computed.
  EXPECT_EQ(sink->routing().tokens, golden_.length + static_cast<int>(tokens.size()) - 1);
  engine->ExpectIdle();
}

TEST_F(EngineTest, CancelDoesNotReachALaterRequestOfTheSameId) {
  auto engine = Start({.max_num_seqs = 1});
  auto ended = engine->Submit(Prompt("same", golden_.Prompt(0), 1));
  ASSERT_TRUE(ended->Wait().ok());
  auto holding = std::make_shared<HoldingSink>();  // keeps the later request from ending meanwhile
  ASSERT_TRUE(engine->get().Submit(Prompt("holding", golden_.Prompt(0), 2), holding).ok());
  auto later = engine->Submit(Prompt("same", golden_.Prompt(0), 20));
  engine->get().Cancel(ended.get());
  holding->GoOn();
  EXPECT_TRUE(later->Wait().ok()) << later->Wait();
  EXPECT_EQ(later->tokens().size(), 20u);
}

TEST_F(EngineTest, DrainFinishesWhatRunsAndRefusesTheRest) {
  auto engine = Start();
  auto sink = engine->Submit(Prompt("a", golden_.Prompt(0), 50));
  engine->get().Drain(absl::InfiniteFuture());
  EXPECT_TRUE(sink->Wait().ok());
  EXPECT_EQ(sink->tokens().size(), 50u);
  EXPECT_TRUE(absl::IsUnavailable(
      engine->get().Submit(Prompt("b", {1}, 1), std::make_shared<CollectingSink>())));
}

TEST_F(EngineTest, WhatOutlivesTheDrainIsUnavailable) {
  auto engine = Start();
  auto holding = std::make_shared<HoldingSink>();
  ASSERT_TRUE(engine->get().Submit(Prompt("holding", golden_.Prompt(0), 90), holding).ok());
  auto sink = engine->Submit(Prompt("a", golden_.Prompt(0), 50));
  holding->WaitForToken();
  std::thread drainer([&] { EXPECT_TRUE(engine->get().Drain(SteadyNow())); });
  while (!absl::IsUnavailable(
      engine->get().Submit(Prompt("holding", {1}, 1), std::make_shared<CollectingSink>()))) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  holding->GoOn();
  drainer.join();
  EXPECT_TRUE(absl::IsUnavailable(sink->Wait())) << sink->Wait();
}

// HoldingSink keeps the engine's thread in a step.
TEST_F(EngineTest, ProgressTellsARunningStepFromAnIdleEngine) {
  auto engine = Start();
  const auto wait_until = [&](bool idle) {
    for (int i = 0; i < 5000 && engine->get().Progress().idle != idle; ++i) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return engine->get().Progress().idle == idle;
  };
  ASSERT_TRUE(wait_until(true));
  auto holding = std::make_shared<HoldingSink>();
  ASSERT_TRUE(engine->get().Submit(Prompt("holding", golden_.Prompt(0), 4), holding).ok());
  holding->WaitForToken();
  const EngineProgress in_step = engine->get().Progress();
  EXPECT_FALSE(in_step.idle);
  EXPECT_EQ(engine->get().Progress().rounds, in_step.rounds);
  holding->GoOn();
  ASSERT_TRUE(wait_until(true));
  EXPECT_GT(engine->get().Progress().rounds, in_step.rounds);
}

// Submits 1,000 requests from 32 threads and cancels a third of them at random. Each must end
// exactly once, and all memory must be free afterwards.
TEST_F(EngineTest, ManyThreadsAndCancels) {
  auto engine = Start({.max_num_seqs = 24, .max_step_tokens = 96, .max_queued_seqs = 2000});
  constexpr int kThreads = 32, kPerThread = 32;
  std::atomic<int> answers{0}, cancelled{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<uint64_t>(1000 + t));
      for (int i = 0; i < kPerThread; ++i) {
        const std::string id = std::to_string(t) + "." + std::to_string(i);
        std::vector<TokenId> prompt = golden_.Prompt(random.Below(golden_.prompts));
        prompt.resize(static_cast<size_t>(1 + random.Below(60)));
        Request r = Prompt(id, prompt, 1 + random.Below(64));
        if (random.Below(2) == 0) {
          r.sampling.temperature = 1.0;
          r.sampling.seed = i;
        }
        auto sink = engine->Submit(std::move(r));
        if (random.Below(3) == 0) {
          if (random.Below(2) == 0) std::this_thread::yield();
          engine->get().Cancel(sink.get());
        }
        const absl::Status status = sink->Wait();
        ASSERT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
        ASSERT_EQ(sink->endings(), 1);
        cancelled += absl::IsCancelled(status);
        ++answers;
        if (i % 8 == 0) (void)engine->get().ExpertSnapshot();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(answers.load(), kThreads * kPerThread);
  EXPECT_GT(cancelled.load(), 0);
  engine->ExpectIdle();
}

}  // namespace
}  // namespace moeserve::testing

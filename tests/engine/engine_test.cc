// The engine: results that do not depend on company, limits, cancellation, accounting.

#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/sampler.h"
#include "model_loaders/loader.h"
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
  // A tiny model whose every layer routes, in attention and in feed-forward.
  std::unique_ptr<TestEngine> Start(const EngineOptions& options = {},
                                    DType compute = DType::kF32) {
    auto engine = TestEngine::Start(SourcePath("tests/golden/tiny-moa-groups-split-cosine"),
                                    options, compute);
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
  // Small steps, so that the prompt is run in parts.
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

// Greedy and seeded answers, their log-probabilities included, are the same alone and among many,
// for any step size.
TEST_F(EngineTest, AnswersDoNotDependOnCompany) {
  for (DType compute : {DType::kF32, DType::kBF16}) {
    auto make = [&](int i) {
      Random random(static_cast<uint64_t>(i));
      std::vector<TokenId> prompt = golden_.Prompt(i % golden_.prompts);
      prompt.resize(static_cast<size_t>(1 + random.Below(60)));
      Request r = Prompt(std::to_string(i), prompt, 1 + random.Below(20));
      if (i % 2 == 1) {
        r.sampling.temperature = 0.8;
        r.sampling.top_p = 0.9;
        r.sampling.top_k = 40;
        r.sampling.seed = i * 7;
      }
      r.sampling.logprobs = 1;
      return r;
    };
    constexpr int kRequests = 40;
    std::vector<std::vector<TokenId>> tokens;
    std::vector<std::vector<float>> logprobs;
    auto keep = [](const CollectingSink& sink) {
      std::vector<float> values;
      for (const TokenLogprob& l : sink.logprobs()) values.push_back(l.logprob);
      return values;
    };
    {
      auto alone = Start({}, compute);
      for (int i = 0; i < kRequests; ++i) {
        auto sink = alone->Submit(make(i));
        ASSERT_TRUE(sink->Wait().ok());
        tokens.push_back(sink->tokens());
        logprobs.push_back(keep(*sink));
      }
    }
    for (int step_tokens : {16, 64, 512}) {
      auto together = Start({.max_num_seqs = 16, .max_step_tokens = step_tokens}, compute);
      std::vector<std::shared_ptr<CollectingSink>> sinks;
      for (int i = 0; i < kRequests; ++i) sinks.push_back(together->Submit(make(i)));
      for (int i = 0; i < kRequests; ++i) {
        ASSERT_TRUE(sinks[i]->Wait().ok());
        EXPECT_EQ(sinks[i]->tokens(), tokens[i]) << "request " << i;
        EXPECT_EQ(keep(*sinks[i]), logprobs[i]) << "request " << i;
      }
    }
  }
}

// rows = split heads * tokens; with top-k the selections are k * rows; with top-p between rows and
// max * rows. The last sampled token of a request is never run.
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
  r.sampling.top_p = 0.0;
  EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument);
  r.sampling.top_p = 1.0;
  r.sampling.temperature = NAN;
  EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument);
  r.sampling.temperature = 0.0;
  r.sampling.stop = {"x"};  // no tokenizer here
  EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Prompt("a", std::vector<TokenId>(90, 1), 10)), absl::StatusCode::kOk);
}

TEST_F(EngineTest, ABoundedQueueRefusesAndCancelFreesEverything) {
  auto engine = Start({.max_num_seqs = 1, .max_queued_seqs = 3});
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  absl::Status refused;
  for (int i = 0; i < 50 && refused.ok(); ++i) {
    auto sink = std::make_shared<CollectingSink>();
    refused = engine->get().Submit(Prompt(std::to_string(i), golden_.Prompt(0), 90), sink);
    if (refused.ok()) sinks.push_back(sink);
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine->get()
                    .Submit(Prompt("0", golden_.Prompt(0), 1), std::make_shared<CollectingSink>())
                    .code() == absl::StatusCode::kOk,
            false);
  for (int i = 0; i < 50; ++i) engine->get().Cancel(std::to_string(i));
  for (const auto& s : sinks) {
    const absl::Status status = s->Wait();
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  }
  engine->ExpectIdle();
  // A deadline that has passed ends the request without running it.
  Request late = Prompt("late", golden_.Prompt(0), 10);
  late.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(engine->Submit(late)->Wait()));
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

// 1,000 requests from 32 threads, a third cancelled at random: each gets exactly one answer and
// nothing is left behind.
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
          engine->get().Cancel(id);
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

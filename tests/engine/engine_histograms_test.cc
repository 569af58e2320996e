// The engine's histograms of requests and steps: everything must be measured once, and sums must
// agree.

#include "engine/engine_histograms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

TEST(BucketCounts, CountsUpToEachBound) {
  static constexpr std::array kBounds = {1.0, 2.0, 5.0};
  BucketCounts counts(kBounds);
  for (const double value : {0.5, 1.0, 1.5, 4.0, 100.0}) counts.Observe(value);
  counts.Observe(2.0, 3);
  counts.Observe(std::numeric_limits<double>::infinity());
  EXPECT_EQ(std::vector(counts.counts().begin(), counts.counts().end()),
            (std::vector<uint64_t>{2, 4, 1, 2}));
  EXPECT_EQ(counts.total(), 9u);
  const BucketCounts copy = counts;
  counts.Observe(1.0);
  EXPECT_EQ(copy.total(), 9u);
}

TEST(EngineHistograms, BoundsAscendAndFit) {
  const EngineHistograms all;
  for (const BucketCounts* counts : {&all.queue_seconds, &all.prefill_seconds, &all.decode_seconds,
                                     &all.inference_seconds, &all.step_tokens, &all.step_sequences,
                                     &all.prefill_step_seconds, &all.decode_step_seconds}) {
    EXPECT_LT(counts->bounds().size(), BucketCounts::kMaxBuckets);
    EXPECT_TRUE(std::is_sorted(counts->bounds().begin(), counts->bounds().end(),
                               [](double a, double b) { return a <= b; }));
    EXPECT_EQ(counts->total(), 0u);
  }
}

std::unique_ptr<TestEngine> Start(const EngineOptions& options) {
  auto engine = TestEngine::Start(SourcePath("tests/golden/tiny-moa-groups-split-cosine"), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

Request HistogramPrompt(const std::string& id, int length, int max_tokens) {
  Request r;
  r.id = id;
  r.prompt.resize(static_cast<size_t>(length));
  std::iota(r.prompt.begin(), r.prompt.end(), 1);
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  return r;
}

// Returns the stats after all steps are counted: a response can be delivered before its step has
// ended.
EngineStats Settled(TestEngine& engine) {
  engine.ExpectIdle();
  EngineStats stats = engine.get().Stats();
  for (int i = 0; i < 100; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
    EngineStats later = engine.get().Stats();
    if (later.steps == stats.steps) return later;
    stats = later;
  }
  return stats;
}

TEST(EngineHistograms, EveryRequestAndStepIsMeasuredOnce) {
  // Long prompts run in small steps, together with decoding of different lengths.
  auto engine = Start({.max_num_seqs = 3, .max_step_tokens = 8});
  const absl::Time begin = absl::Now();
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 7; ++i) {
    sinks.push_back(engine->Submit(HistogramPrompt(std::to_string(i), 3 + 4 * i, i)));
  }
  for (const auto& sink : sinks) ASSERT_TRUE(sink->Wait().ok());
  const EngineStats stats = Settled(*engine);
  const double elapsed = absl::ToDoubleSeconds(absl::Now() - begin);
  const EngineHistograms& h = stats.histograms;

  EXPECT_EQ(h.queue_seconds.total(), 7u);
  EXPECT_EQ(h.prefill_seconds.total(), 7u);
  EXPECT_EQ(h.inference_seconds.total(), 7u);
  EXPECT_EQ(h.decode_seconds.total(), 6u) << "one asked for no token";
  EXPECT_NEAR(h.inference_seconds.sum(), h.prefill_seconds.sum() + h.decode_seconds.sum(), 1e-3);
  EXPECT_LE(h.inference_seconds.sum(), 3 * elapsed) << "three at a time";
  EXPECT_GT(h.queue_seconds.sum(), 0.0);

  EXPECT_EQ(h.step_tokens.total(), stats.steps);
  EXPECT_EQ(h.step_sequences.total(), stats.steps);
  EXPECT_EQ(h.prefill_step_seconds.total() + h.decode_step_seconds.total(), stats.steps);
  EXPECT_GT(h.prefill_step_seconds.total(), 0u);
  EXPECT_GT(h.decode_step_seconds.total(), 0u);
  EXPECT_DOUBLE_EQ(h.prefill_step_seconds.sum() + h.decode_step_seconds.sum(), stats.step_seconds);
  const ExpertStats experts = engine->get().ExpertSnapshot();
  EXPECT_EQ(h.step_tokens.sum(), static_cast<double>(experts.tokens + experts.recomputed_tokens));
  EXPECT_LE(h.step_sequences.sum(), h.step_tokens.sum());
  EXPECT_EQ(h.step_tokens.counts().back(), 0u);
}

TEST(EngineHistograms, StepsWithoutPromptsAreDecodeSteps) {
  auto engine = Start({});
  ASSERT_TRUE(engine->Submit(HistogramPrompt("a", 5, 9))->Wait().ok());
  const EngineStats stats = Settled(*engine);
  EXPECT_EQ(stats.histograms.prefill_step_seconds.total(), 1u);
  EXPECT_EQ(stats.histograms.decode_step_seconds.total(), 8u);
  EXPECT_EQ(stats.histograms.step_sequences.sum(), 9.0);
  EXPECT_EQ(stats.histograms.step_tokens.sum(), 13.0);
}

TEST(EngineHistograms, SamplesAreMeasuredEach) {
  auto engine = Start({.max_num_seqs = 2});
  std::vector<Request> requests;
  std::vector<std::shared_ptr<TokenSink>> sinks;
  std::vector<std::shared_ptr<CollectingSink>> answers;
  for (int i = 0; i < 5; ++i) {
    requests.push_back(HistogramPrompt(std::to_string(i), 20, 4));
    requests.back().sampling.sample_index = i;
    answers.push_back(std::make_shared<CollectingSink>());
    sinks.push_back(answers.back());
  }
  ASSERT_TRUE(engine->get().Submit(std::move(requests), std::move(sinks)).ok());
  for (const auto& answer : answers) ASSERT_TRUE(answer->Wait().ok());
  const EngineHistograms h = Settled(*engine).histograms;
  for (const BucketCounts* counts :
       {&h.queue_seconds, &h.prefill_seconds, &h.decode_seconds, &h.inference_seconds}) {
    EXPECT_EQ(counts->total(), 5u);
  }
}

// Blocks the engine at the first piece of output until Open() is called.
class GateSink final : public CollectingSink {
 public:
  void OnDelta(OutputDelta delta) override {
    entered_.store(true);
    entered_.notify_all();
    open_.wait(false);
    CollectingSink::OnDelta(std::move(delta));
  }
  void WaitUntilEntered() { entered_.wait(false); }
  void Open() {
    open_.store(true);
    open_.notify_all();
  }

 private:
  std::atomic<bool> entered_ = false;
  std::atomic<bool> open_ = false;
};

TEST(EngineHistograms, WaitsThatAreGivenUpCount) {
  auto engine = Start({.max_num_seqs = 1, .max_queue_wait = absl::Milliseconds(50)});
  const auto gate = std::make_shared<GateSink>();
  ASSERT_TRUE(engine->get().Submit(HistogramPrompt("running", 4, 100), gate).ok());
  gate->WaitUntilEntered();
  const auto late = engine->Submit(HistogramPrompt("late", 4, 4));
  const auto cancelled = engine->Submit(HistogramPrompt("cancelled", 4, 4));
  engine->get().Cancel(cancelled.get());
  engine->get().Cancel(gate.get());
  absl::SleepFor(absl::Milliseconds(60));
  gate->Open();
  EXPECT_TRUE(absl::IsCancelled(gate->Wait()));
  EXPECT_TRUE(absl::IsCancelled(cancelled->Wait()));
  EXPECT_TRUE(absl::IsResourceExhausted(late->Wait()));
  const EngineHistograms h = Settled(*engine).histograms;
  EXPECT_EQ(h.queue_seconds.total(), 3u);
  EXPECT_GE(h.queue_seconds.sum(), 2 * 0.06);
  EXPECT_EQ(h.prefill_seconds.total(), 1u);
  // No request ended regularly: these histograms only measure requests that did.
  EXPECT_EQ(h.decode_seconds.total(), 0u);
  EXPECT_EQ(h.inference_seconds.total(), 0u);
}

}  // namespace
}  // namespace moeserve::testing

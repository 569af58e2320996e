// Submits ten thousand varied requests from many threads and cancels a third of them. Each must end
// once, and memory, queue and ids must be free afterwards.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/steady_clock.h"
#include "engine/engine.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kThreads = 16;
constexpr int kRequests = 10'000;

// Returns the samples of one random request. Some prompts share the beginning of one of three
// prompts; some requests have several samples, some are beam searches.
std::vector<Request> MakeSamples(const std::string& id, const Golden& golden, Random& random) {
  Request r;
  r.prompt = golden.Prompt(random.Below(3));
  r.prompt.resize(static_cast<size_t>(1 + random.Below(static_cast<int>(r.prompt.size()))));
  r.sampling.max_tokens = 1 + random.Below(random.Below(4) == 0 ? 40 : 12);
  r.sampling.temperature = random.Below(2);
  r.sampling.seed = random.Below(5);
  r.sampling.ignore_eos = random.Below(2) == 0;
  if (random.Below(4) == 0) r.sampling.logprobs = random.Below(3);
  if (random.Below(8) == 0) r.sampling.prompt_logprobs = 1;
  if (random.Below(8) == 0) r.sampling.repetition_penalty = 1.2;
  if (random.Below(8) == 0) r.sampling.min_tokens = 1;
  if (random.Below(8) == 0) r.cache_salt = "salt";
  if (random.Below(8) == 0) r.priority = random.Below(5) - 2;
  if (random.Below(20) == 0) r.deadline = SteadyNow() + absl::Milliseconds(random.Below(20));
  r.expert_counts = random.Below(4) == 0;
  r.routing_record = random.Below(4) == 0;
  const int samples = random.Below(6) == 0 ? 2 + random.Below(3) : 1;
  if (random.Below(6) == 0) {
    r.sampling.beam = BeamParams{.num_beams = samples + random.Below(2)};
    r.sampling.seed.reset();
  }
  std::vector<Request> out;
  for (int s = 0; s < samples; ++s) {
    r.id = id + "." + std::to_string(s);
    r.sampling.sample_index = s;
    out.push_back(r);
  }
  return out;
}

TEST(Soak, TenThousandMixedRequestsLeaveNothingBehind) {
  auto golden =
      ReadGolden(SourcePath("tests/golden/tiny-moa-groups-split-cosine/golden.safetensors"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  EngineOptions options{
      .max_model_len = 128, .max_num_seqs = 12, .max_step_tokens = 64, .routing_records = true};
  options.max_queued_seqs = 24;
  const std::string model = SourcePath("tests/golden/tiny-moa-groups-split-cosine");
  auto started = TestEngine::Start(model, options);
  ASSERT_TRUE(started.ok()) << started.status();
  // Capacity for three sequences of the largest length, so that sequences are preempted.
  options.kv_cache_bytes = (*started)->BytesFor(3 * 128);
  started = TestEngine::Start(model, options);
  ASSERT_TRUE(started.ok()) << started.status();
  TestEngine& engine = **started;

  std::atomic<int> next{0}, completed{0}, cancelled{0}, expired{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = next++; i < kRequests; i = next++) {
        Random random(static_cast<uint64_t>(i) + 1);
        const std::vector<Request> requests = MakeSamples(std::to_string(i), *golden, random);
        std::vector<std::shared_ptr<CollectingSink>> sinks;
        std::vector<std::shared_ptr<TokenSink>> given;
        for (size_t s = 0; s < requests.size(); ++s) {
          sinks.push_back(std::make_shared<CollectingSink>());
          given.push_back(sinks.back());
        }
        absl::Status accepted = engine.get().Submit(requests, given);
        for (; absl::IsResourceExhausted(accepted);
             accepted = engine.get().Submit(requests, given)) {
          ++refused;
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        ASSERT_TRUE(accepted.ok()) << accepted;
        const bool cancel = random.Below(3) == 0;
        if (cancel && random.Below(2) == 0) std::this_thread::yield();
        for (size_t s = 0; s < sinks.size(); ++s) {
          if (cancel && random.Below(2) == 0) engine.get().Cancel(sinks[s].get());
          const absl::Status status = sinks[s]->Wait();
          completed += status.ok();
          cancelled += absl::IsCancelled(status);
          expired += absl::IsDeadlineExceeded(status);
          ASSERT_TRUE(status.ok() || absl::IsCancelled(status) || absl::IsDeadlineExceeded(status))
              << status;
          ASSERT_EQ(sinks[s]->endings(), 1);
        }
        if (i % 64 == 0) {
          (void)engine.get().ExpertSnapshot();
          (void)engine.get().Stats();
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_GT(completed.load(), kRequests / 2);
  EXPECT_GT(cancelled.load(), kRequests / 50);
  engine.ExpectIdle();
  const EngineStats stats = engine.get().Stats();
  EXPECT_GT(stats.preemptions, 0u);
  EXPECT_GT(stats.prefix_hit_tokens, 0u);
  EXPECT_GT(stats.beam_rows, 1000u);
  EXPECT_EQ(stats.kv_blocks_used, 0);
  EXPECT_LE(stats.kv_blocks_evictable, stats.kv_blocks_total);
  EXPECT_EQ(stats.finished_stop + stats.finished_length, static_cast<uint64_t>(completed.load()));
  EXPECT_EQ(stats.finished_abort, static_cast<uint64_t>(cancelled.load() + expired.load()));
  EXPECT_EQ(stats.finished_error, 0u);
  EXPECT_EQ(stats.rejected_queue_full, static_cast<uint64_t>(refused.load()));
  // All memory must be usable again: a request of the largest length, for which no cached block can
  // be reused, succeeds.
  Request whole;
  whole.id = "whole";
  whole.prompt = golden->Prompt(4);
  whole.cache_salt = "another";
  whole.sampling.max_tokens = 128 - static_cast<int>(whole.prompt.size());
  whole.sampling.ignore_eos = true;
  EXPECT_TRUE(engine.Submit(std::move(whole))->Wait().ok());
  engine.ExpectIdle();
}

}  // namespace
}  // namespace moeserve::testing

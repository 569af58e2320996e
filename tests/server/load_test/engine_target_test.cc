#include "server/bench/load_test/engine_target.h"

#include <gtest/gtest.h>

#include "server/bench/load_test/driver.h"
#include "server/bench/load_test/load_report.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

using testing::FakeEngine;
using testing::Script;

Workload EngineWorkload(int output = 5) {
  return *Workload::Create({.prompt = {3, 6}, .output = {output, output}, .vocab_size = 100});
}

std::shared_ptr<FakeEngine> Endless(int fail_after = -1) {
  Script script;
  script.endless = true;
  script.fail_after = fail_after;
  return std::make_shared<FakeEngine>(script);
}

TEST(EngineTargetTest, EveryRequestComesBackOnce) {
  const auto engine = Endless();
  EngineTarget target(engine, 30.0);
  const LoadRun run = RunLoad({.clients = 7, .requests = 200}, EngineWorkload(), target);
  const LoadReport report = MakeReport(run);
  EXPECT_EQ(report.completed, 200);
  EXPECT_EQ(report.wrong_length, 0);
  EXPECT_EQ(report.unanswered + report.answered_twice + report.cut_off, 0);
  EXPECT_EQ(report.all.inter_token.count, 200 * 4);
  const auto submitted = engine->submitted();
  ASSERT_EQ(submitted.size(), 200u);
  for (const Request& request : submitted) {
    EXPECT_TRUE(request.sampling.ignore_eos);
    EXPECT_EQ(request.sampling.temperature, 0.0);
  }
  for (const LoadSample& sample : run.samples) {
    EXPECT_EQ(sample.result.prompt_tokens, sample.sent_prompt_tokens);
  }
}

TEST(EngineTargetTest, ErrorsAreNamedAsOverHttp) {
  Script script;
  script.submit_error = absl::ResourceExhaustedError("the queue is full");
  EngineTarget full(std::make_shared<FakeEngine>(script), 30.0);
  LoadReport report = MakeReport(
      RunLoad({.clients = 2, .requests = 10, .error_pause = 0.0}, EngineWorkload(), full));
  EXPECT_EQ(report.errors.at("503 queue_full").count, 10);
  EXPECT_EQ(report.refusals.count, 10);
  EXPECT_EQ(report.retry_after.count, 10);
  EXPECT_EQ(report.unanswered, 0);

  EngineTarget failing(Endless(2), 30.0);
  report = MakeReport(
      RunLoad({.clients = 2, .requests = 10, .error_pause = 0.0}, EngineWorkload(), failing));
  EXPECT_EQ(report.errors.at("stream error internal_error").count, 10);
  EXPECT_EQ(report.refusals.count, 0);
}

TEST(EngineTargetTest, CutsOffWhatHangs) {
  Script script;
  script.held = true;
  const auto engine = std::make_shared<FakeEngine>(script);
  {
    EngineTarget target(engine, 3600.0);
    // The scripted engine checks deadlines itself; no deadline passes here.
    const LoadRun run =
        RunLoad({.clients = 3, .seconds = 0.02, .drain_seconds = 0.02}, EngineWorkload(), target);
    EXPECT_EQ(run.cut_off, 3);
    EXPECT_EQ(run.unanswered, 0);
    target.Start(EngineWorkload().Make(50), target.Now());
  }
  EXPECT_TRUE(engine->WaitForCancelled(4));
}

TEST(EngineTargetTest, TextsNeedATokenizerAndUseIt) {
  const auto engine = Endless();
  EngineTarget target(engine, 30.0);
  const Workload texts = *Workload::Create({.output = {2, 2}, .texts = {"abc"}});
  const LoadRun run = RunLoad({.clients = 1, .requests = 1}, texts, target);
  EXPECT_EQ(run.samples[0].result.error, "");
  EXPECT_EQ(run.samples[0].result.prompt_tokens, 3);
}

// An engine that ends every request twice.
class TwiceEngine final : public Engine {
 public:
  absl::Status Submit(std::vector<Request>,
                      std::vector<std::shared_ptr<TokenSink>> sinks) override {
    const std::shared_ptr<TokenSink>& sink = sinks.front();
    OutputDelta delta;
    delta.tokens = {1};
    delta.finished = true;
    sink->OnDelta(delta);
    sink->OnDelta(delta);
    return absl::OkStatus();
  }
  void Cancel(const TokenSink*) override {}
  bool Drain(absl::Time) override { return true; }
  void Shutdown() override {}
  void Break(absl::Status) override {}
  EngineStats Stats() const override { return {}; }
  EngineProgress Progress() const override { return {}; }
  ExpertStats ExpertSnapshot() const override { return {}; }
  const EngineOptions& options() const override { return options_; }
  const ModelSpec& spec() const override { return spec_; }
  const RouteLayout& route_layout() const override { return layout_; }
  std::optional<TokenExpertCounts> token_expert_counts() const override { return std::nullopt; }
  std::vector<HiddenSample> HiddenSamples() const override { return {}; }
  const Tokenizer* tokenizer() const override { return nullptr; }

 private:
  ModelSpec spec_;
  RouteLayout layout_;
  const EngineOptions options_ = {.max_model_len = 100};
};

TEST(EngineTargetTest, ASecondEndIsSeen) {
  EngineTarget target(std::make_shared<TwiceEngine>(), 30.0);
  const LoadRun run = RunLoad({.clients = 1, .requests = 3}, EngineWorkload(1), target);
  EXPECT_EQ(run.answered_twice, 3);
  const Workload texts = *Workload::Create({.output = {2, 2}, .texts = {"abc"}});
  const LoadRun refused = RunLoad({.clients = 1, .requests = 1}, texts, target);
  EXPECT_EQ(refused.samples[0].result.error, "400 invalid_value");
}

}  // namespace
}  // namespace moeserve::server

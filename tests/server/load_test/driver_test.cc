#include "server/bench/load_test/driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

namespace moeserve::server {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The scripted result of one request.
struct Fate {
  double seconds = 1.0;  // until the request ends; kNever if it does not end
  std::string error = {};
  int results = 1;
  bool answered = true;
};

// A target with simulated time: waiting advances the clock at once.
class SimulatedTarget final : public LoadTarget {
 public:
  explicit SimulatedTarget(std::function<Fate(int64_t)> fate) : fate_(std::move(fate)) {}

  double Now() override { return now_; }

  void Start(const LoadRequest& request, double scheduled) override {
    started.push_back(request.index);
    starts.push_back(scheduled);
    const Fate fate = fate_(request.index);
    ++running_;
    most_running = std::max(most_running, running_);
    for (int i = 0; i < fate.results; ++i) {
      RequestResult result;
      result.index = request.index;
      result.start = scheduled;
      result.error = fate.error;
      result.answered = fate.answered;
      result.output_tokens = request.output_tokens;
      pending_.emplace(now_ + fate.seconds + 1e-9 * i, result);
    }
  }

  std::vector<RequestResult> Wait(double until) override {
    if (pending_.empty() || pending_.begin()->first > until) {
      now_ = std::max(now_, until);
      return {};
    }
    now_ = std::max(now_, pending_.begin()->first);
    std::vector<RequestResult> results;
    while (!pending_.empty() && pending_.begin()->first <= now_) {
      results.push_back(pending_.begin()->second);
      results.back().end = now_;
      pending_.erase(pending_.begin());
      --running_;
    }
    return results;
  }

  void CancelAll() override {
    ++cancelled;
    std::multimap<double, RequestResult> ended;
    for (auto& [time, result] : pending_) {
      result.error = "cut off";
      result.cut_off = true;
      result.answered = false;
      if (!deaf) ended.emplace(now_, result);
    }
    pending_ = std::move(ended);
  }

  Result<ServerCounters> Counters() override { return absl::UnavailableError("none"); }

  std::vector<int64_t> started;
  std::vector<double> starts;
  int most_running = 0;
  int cancelled = 0;
  bool deaf = false;  // whether cancelled requests get no result

 private:
  const std::function<Fate(int64_t)> fate_;
  double now_ = 100.0;
  int running_ = 0;
  std::multimap<double, RequestResult> pending_;
};

Workload AnyWorkload() {
  return *Workload::Create({.prompt = {1, 4}, .output = {1, 4}, .vocab_size = 10});
}

Fate FixedFate(int64_t) { return {}; }

TEST(DriverTest, ClosedLoopKeepsEveryClientBusy) {
  SimulatedTarget target(FixedFate);
  const LoadRun run = RunLoad({.clients = 3, .seconds = 10.5}, AnyWorkload(), target);
  // 11 rounds, which begin at 0, 1, ... 10 seconds.
  EXPECT_EQ(run.samples.size(), 33u);
  EXPECT_EQ(target.most_running, 3);
  EXPECT_NEAR(run.last_start - run.begin, 10.0, 1e-6);
  EXPECT_NEAR(run.end - run.begin, 11.0, 1e-6);
  EXPECT_EQ(run.unanswered + run.answered_twice + run.cut_off, 0);
  for (size_t i = 0; i < run.samples.size(); ++i) {
    EXPECT_EQ(target.started[i], static_cast<int64_t>(i));
    EXPECT_EQ(run.samples[i].results, 1);
  }
}

TEST(DriverTest, ClosedLoopSlowRequestsHoldBackTheirOwnClientOnly) {
  SimulatedTarget target([](int64_t index) { return Fate{.seconds = index == 0 ? 5.0 : 1.0}; });
  const LoadRun run = RunLoad({.clients = 2, .requests = 6}, AnyWorkload(), target);
  EXPECT_EQ(run.samples.size(), 6u);
  EXPECT_NEAR(run.last_start - run.begin, 4.0, 1e-6);
  EXPECT_NEAR(run.end - run.begin, 5.0, 1e-6);
}

TEST(DriverTest, AnInterruptionCutsOffWhatRuns) {
  SimulatedTarget target([](int64_t index) { return Fate{.seconds = index < 4 ? 1.0 : kNever}; });
  const auto stop = [&] { return target.Now() >= 105.0; };  // the run begins at 100
  const LoadRun run = RunLoad({.clients = 2, .requests = 1000, .drain_seconds = 600.0},
                              AnyWorkload(), target, {}, stop);
  EXPECT_TRUE(run.interrupted);
  EXPECT_EQ(run.samples.size(), 6u);
  EXPECT_EQ(run.cut_off, 2);
  EXPECT_EQ(run.unanswered + run.answered_twice, 0);
  EXPECT_NEAR(run.end - run.begin, 5.0, 0.5);  // without the time of draining
}

TEST(DriverTest, AClientPausesAfterAnError) {
  SimulatedTarget target([](int64_t) { return Fate{.seconds = 0.0, .error = "503 queue_full"}; });
  const LoadRun run =
      RunLoad({.clients = 1, .seconds = 9.9, .error_pause = 1.0}, AnyWorkload(), target);
  EXPECT_EQ(run.samples.size(), 10u);
}

TEST(DriverTest, OpenLoopFollowsTheArrivalsWhateverTheAnswers) {
  const double rate = 50.0;
  SimulatedTarget target([](int64_t) { return Fate{.seconds = 30.0}; });
  const LoadRun run = RunLoad({.rate = rate, .seed = 5, .seconds = 20.0}, AnyWorkload(), target);
  PoissonArrivals arrivals(rate, 5);
  size_t expected = 0;
  for (double at = arrivals.Next(); at < 20.0; at = arrivals.Next(), ++expected) {
    ASSERT_LT(expected, target.starts.size());
    EXPECT_DOUBLE_EQ(target.starts[expected], run.begin + at);
  }
  EXPECT_EQ(run.samples.size(), expected);
  EXPECT_EQ(target.most_running, static_cast<int>(expected));
  ASSERT_EQ(run.start_lags.size(), expected);
  for (const double lag : run.start_lags) EXPECT_NEAR(lag, 0.0, 1e-9);
}

TEST(DriverTest, AnOpenLoopThatIsLateStillSendsAndSaysSo) {
  // The first response blocks the sender for two seconds.
  class SlowToReturn final : public LoadTarget {
   public:
    double Now() override { return now_; }
    void Start(const LoadRequest& request, double scheduled) override {
      RequestResult result;
      result.index = request.index;
      result.start = scheduled;
      result.answered = true;
      results_.push_back(result);
    }
    std::vector<RequestResult> Wait(double until) override {
      now_ = std::max(now_, until) + 2.0;
      return std::exchange(results_, {});
    }
    void CancelAll() override {}
    Result<ServerCounters> Counters() override { return ServerCounters(); }

   private:
    double now_ = 0.0;
    std::vector<RequestResult> results_;
  } target;
  const LoadRun run = RunLoad({.rate = 100.0, .seconds = 1.0}, AnyWorkload(), target);
  EXPECT_GT(run.samples.size(), 60u);
  EXPECT_GT(*std::max_element(run.start_lags.begin(), run.start_lags.end()), 1.0);
  for (const LoadSample& sample : run.samples) EXPECT_LT(sample.result.start, 1.0);
}

TEST(DriverTest, CountsAnswersThatAreMissingOrTwice) {
  SimulatedTarget target([](int64_t index) {
    if (index == 2) return Fate{.seconds = kNever};
    if (index == 4) return Fate{.results = 2};
    if (index == 5) return Fate{.error = "connection reset", .answered = false};
    return Fate{};
  });
  target.deaf = true;
  const LoadRun run =
      RunLoad({.clients = 4, .requests = 8, .drain_seconds = 20.0}, AnyWorkload(), target);
  EXPECT_EQ(run.samples.size(), 8u);
  EXPECT_EQ(run.unanswered, 2);
  EXPECT_EQ(run.answered_twice, 1);
  EXPECT_EQ(run.samples[2].results, 0);
  EXPECT_EQ(run.samples[4].results, 2);
  EXPECT_EQ(target.cancelled, 1);
  EXPECT_LT(run.end - run.begin, 40.0);
}

TEST(DriverTest, CutsOffWhatTakesTooLongAndDoesNotCallItUnanswered) {
  SimulatedTarget target(
      [](int64_t index) { return Fate{.seconds = index % 2 == 0 ? 1000.0 : 1.0}; });
  const LoadRun run =
      RunLoad({.clients = 2, .seconds = 5.0, .drain_seconds = 3.0}, AnyWorkload(), target);
  EXPECT_EQ(run.cut_off, 2);
  EXPECT_EQ(run.unanswered, 0);
  EXPECT_NEAR(run.end - run.begin, 8.0, 0.1);
}

TEST(DriverTest, WarmUpRequestsAreOthersAndFailOnlyTogether) {
  SimulatedTarget target(
      [](int64_t index) { return index == -3 ? Fate{} : Fate{.error = "503 queue_full"}; });
  EXPECT_TRUE(WarmUp(4, 2, AnyWorkload(), target).ok());
  EXPECT_EQ(target.started, (std::vector<int64_t>{-1, -2, -3, -4}));
  EXPECT_EQ(target.most_running, 2);
  const absl::Status failed = WarmUp(2, 2, AnyWorkload(), target);
  EXPECT_TRUE(absl::IsUnavailable(failed));
  EXPECT_NE(failed.ToString().find("503 queue_full"), std::string::npos);
}

TEST(DriverTest, OptionsMustNameOneLoopAndAnEnd) {
  EXPECT_TRUE(CheckLoadOptions({.clients = 1, .requests = 1}).ok());
  EXPECT_TRUE(CheckLoadOptions({.rate = 1.0, .seconds = 1.0}).ok());
  EXPECT_FALSE(CheckLoadOptions({.clients = 1, .rate = 1.0, .requests = 1}).ok());
  EXPECT_FALSE(CheckLoadOptions({.requests = 1}).ok());
  EXPECT_FALSE(CheckLoadOptions({.clients = 1}).ok());
}

}  // namespace
}  // namespace moeserve::server

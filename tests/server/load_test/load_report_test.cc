#include "server/bench/load_test/load_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "nlohmann/json.hpp"
#include "tests/support/random.h"

namespace moeserve::server {
namespace {

TEST(SummarizeTest, PercentilesAreTheLeastSamplesThatCoverTheirShare) {
  moeserve::testing::Random random(1);
  for (int size = 1; size <= 300; ++size) {
    std::vector<double> samples;
    for (int i = 0; i < size; ++i) samples.push_back(random.Below(40) * 0.25);
    const Distribution d = Summarize(samples);
    EXPECT_EQ(d.count, size);
    EXPECT_EQ(d.max, *std::max_element(samples.begin(), samples.end()));
    const auto check = [&](double value, int percent) {
      const auto covered = [&](auto below) {
        return 100 * static_cast<int>(std::count_if(samples.begin(), samples.end(), below));
      };
      EXPECT_GE(covered([&](double s) { return s <= value; }), percent * size);
      EXPECT_LT(covered([&](double s) { return s < value; }), percent * size);
    };
    check(d.p50, 50);
    check(d.p90, 90);
    check(d.p99, 99);
  }
  EXPECT_EQ(Summarize({}).count, 0);
}

LoadSample Sample(double start, std::vector<double> arrivals, double end, int tokens) {
  LoadSample sample;
  sample.results = 1;
  sample.asked_output_tokens = tokens;
  sample.result.start = start;
  sample.result.arrivals = std::move(arrivals);
  sample.result.end = end;
  sample.result.answered = true;
  sample.result.prompt_tokens = 10;
  sample.result.output_tokens = tokens;
  return sample;
}

LoadRun SomeRun() {
  LoadRun run;
  run.begin = 10.0;
  run.last_start = 12.0;
  run.end = 15.0;
  run.samples.push_back(Sample(10.0, {11.0, 11.5, 13.0}, 13.25, 3));
  run.samples.push_back(Sample(12.0, {14.0, 14.5}, 15.0, 4));  // two tokens in each piece
  run.samples[1].long_prompt = true;
  run.samples.push_back(Sample(11.0, {}, 11.125, 5));
  run.samples[2].result.error = "503 queue_full";
  run.samples[2].result.refused = true;
  run.samples[2].result.output_tokens = 0;
  run.samples[2].result.retry_after = 2.0;
  run.samples.push_back({});  // no result
  run.unanswered = 1;
  return run;
}

TEST(LoadReportTest, AddsUpARun) {
  const LoadReport report = MakeReport(SomeRun());
  EXPECT_EQ(report.started, 4);
  EXPECT_EQ(report.completed, 2);
  EXPECT_EQ(report.unanswered, 1);
  EXPECT_EQ(report.wrong_length, 0);
  EXPECT_EQ(report.pieces, 5);
  EXPECT_DOUBLE_EQ(report.seconds, 5.0);
  EXPECT_DOUBLE_EQ(report.requests_per_second, 0.4);
  EXPECT_DOUBLE_EQ(report.input_tokens_per_second, 4.0);
  EXPECT_DOUBLE_EQ(report.output_tokens_per_second, 7.0 / 5.0);
  EXPECT_DOUBLE_EQ(report.full_load_output_tokens_per_second.value(), 2.0 / 2.0);

  EXPECT_EQ(report.all.requests, 2);
  EXPECT_EQ(report.normal.requests, 1);
  EXPECT_EQ(report.long_prompt.requests, 1);
  EXPECT_DOUBLE_EQ(report.normal.first_token.p50, 1.0);
  EXPECT_DOUBLE_EQ(report.normal.inter_token.p50, 0.5);
  EXPECT_DOUBLE_EQ(report.normal.inter_token.max, 1.5);
  EXPECT_DOUBLE_EQ(report.normal.per_output_token.p50, 1.0);
  EXPECT_DOUBLE_EQ(report.normal.duration.p50, 3.25);
  EXPECT_DOUBLE_EQ(report.long_prompt.first_token.p50, 2.0);
  EXPECT_DOUBLE_EQ(report.long_prompt.per_output_token.p50, 0.5 / 3.0);
  EXPECT_EQ(report.all.inter_token.count, 3);

  ASSERT_EQ(report.errors.size(), 1u);
  EXPECT_EQ(report.errors.at("503 queue_full").count, 1);
  EXPECT_DOUBLE_EQ(report.refusals.p99, 0.125);
  EXPECT_DOUBLE_EQ(report.retry_after.max, 2.0);
}

TEST(LoadReportTest, AnAnswerOfAnotherLengthIsSeen) {
  LoadRun run = SomeRun();
  run.samples[0].asked_output_tokens = 9;
  EXPECT_EQ(MakeReport(run).wrong_length, 1);
}

TEST(LoadReportTest, JsonSaysNullForWhatIsNotReported) {
  LoadReport report = MakeReport(SomeRun());
  auto json = nlohmann::json::parse(ReportJson(report, "x\xff"));
  EXPECT_TRUE(json["server"].is_null());
  EXPECT_TRUE(json["idle_streams"].is_null());
  EXPECT_EQ(json["requests"]["unanswered"], 1);
  EXPECT_DOUBLE_EQ(json["normal"]["time_to_first_token_seconds"]["p99"], 1.0);
  EXPECT_EQ(json["errors"]["503 queue_full"]["count"], 1);

  report.server.emplace();
  report.server->steps = 12.0;
  report.server->prefix_queried_tokens = 200.0;
  report.server->prefix_hit_tokens = 50.0;
  report.idle_streams.emplace();
  report.idle_streams->alive = 3;
  json = nlohmann::json::parse(ReportJson(report, "x"));
  EXPECT_EQ(json["server"]["steps"], 12.0);
  EXPECT_TRUE(json["server"]["preemptions"].is_null());
  EXPECT_EQ(json["server"]["prefix_cache_hit_rate"], 0.25);
  EXPECT_EQ(json["idle_streams"]["alive"], 3);
}

TEST(LoadReportTest, TheTableNamesWhatHappened) {
  LoadReport report = MakeReport(SomeRun());
  report.server.emplace();
  report.server->steps = 12.0;
  const std::string table = ReportTable(report);
  for (const char* text : {"4 started, 2 completed", "unanswered 1", "503 queue_full",
                           "long prompts", "Retry-After: 1 times", "not reported"}) {
    EXPECT_NE(table.find(text), std::string::npos) << text << "\n" << table;
  }
  EXPECT_EQ(ReportTable(LoadReport()), "");
}

TEST(ServerCountersTest, SumsOverLabelsAndSkipsTheRest) {
  const ServerCounters counters = ParseServerCounters(
      "# HELP moeserve_preemptions_total x\n"
      "moeserve_preemptions_total 3\n"
      "moeserve_preemptions_total_more 9\n"
      "moeserve_requests_rejected_total{reason=\"a } b\\\"\"} 4\n"
      "moeserve_requests_rejected_total{reason=\"queue_full\"} 2.5e1\n"
      "moeserve_prompt_tokens_total\n"
      "moeserve_generation_tokens_total nonsense\n"
      "moeserve_engine_steps_total{broken=\"\n"
      "moeserve_prefix_cache_hit_tokens_total NaN");
  EXPECT_EQ(counters.preemptions, 3.0);
  EXPECT_EQ(counters.rejected, 29.0);
  EXPECT_FALSE(counters.prompt_tokens.has_value());
  EXPECT_FALSE(counters.generation_tokens.has_value());
  EXPECT_FALSE(counters.steps.has_value());
  EXPECT_FALSE(counters.prefix_hit_tokens.has_value());
}

TEST(ServerCountersTest, DifferencesNeedBothEndsAndNoRestart) {
  ServerCounters before, after;
  before.steps = 5.0;
  after.steps = 12.0;
  after.preemptions = 3.0;
  before.prompt_tokens = 9.0;
  after.prompt_tokens = 1.0;
  const ServerCounters difference = Difference(after, before);
  EXPECT_EQ(difference.steps, 7.0);
  EXPECT_FALSE(difference.preemptions.has_value());
  EXPECT_FALSE(difference.prompt_tokens.has_value());
}

TEST(ServerCountersTest, DamagedLinesLeaveTheOthersAlone) {
  moeserve::testing::Random random(2);
  const std::string base =
      "moeserve_requests_rejected_total{reason=\"queue_full\"} 25\nmoeserve_prompt_tokens_total "
      "1\n";
  for (int i = 0; i < 20'000; ++i) {
    std::string text = base.substr(0, 1 + random.Below(static_cast<int>(base.size())));
    for (int k = random.Below(4); k > 0; --k) {
      text[random.Below(static_cast<int>(text.size()))] = static_cast<char>(random.Next());
    }
    const ServerCounters counters = ParseServerCounters(
        "moeserve_engine_steps_total 3\n" + text + "\nmoeserve_preemptions_total{model=\"m\"} 7\n");
    ASSERT_EQ(counters.steps, 3.0) << text;
    ASSERT_EQ(counters.preemptions, 7.0) << text;
    ASSERT_TRUE(std::isfinite(counters.rejected.value_or(0.0))) << text;
    ASSERT_TRUE(std::isfinite(counters.prompt_tokens.value_or(0.0))) << text;
  }
}

}  // namespace
}  // namespace moeserve::server

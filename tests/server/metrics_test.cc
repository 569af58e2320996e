#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "absl/time/clock.h"
#include "server/context.h"
#include "server/expert_history.h"
#include "server/expert_report.h"
#include "server/prometheus.h"
#include "server/text_values.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

// Reads an exposition as a scraper would: every rule that is broken is a failure.
std::map<std::string, double> ReadExposition(const std::string& text) {
  std::map<std::string, double> samples;
  std::set<std::string> families;
  std::string family;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# HELP ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_TRUE(families.insert(family).second) << "twice: " << family;
    } else if (line.starts_with("# TYPE ")) {
      EXPECT_EQ(line.substr(7, line.find(' ', 7) - 7), family);
      EXPECT_EQ(line.ends_with(" counter"), family.ends_with("_total")) << family;
    } else {
      const size_t space = line.rfind(' ');
      const std::string name = line.substr(0, space);
      EXPECT_TRUE(name.starts_with(family)) << name << " in " << family;
      EXPECT_TRUE(samples.emplace(name, std::stod(line.substr(space + 1))).second) << name;
    }
  }
  return samples;
}

TEST(PrometheusText, EscapesAndFormats) {
  PrometheusText text;
  text.Family("a_total", "counter", "Line\nand \\ backslash");
  text.Sample({{"l", "q\"b\\n\n"}}, uint64_t{7});
  EXPECT_EQ(text.Take(),
            "# HELP moeserve_a_total Line\\nand \\\\ backslash\n# TYPE moeserve_a_total counter\n"
            "moeserve_a_total{l=\"q\\\"b\\\\n\\n\"} 7\n");
  EXPECT_EQ(PrometheusNumber(std::nan("")), "NaN");
  EXPECT_EQ(PrometheusNumber(std::numeric_limits<double>::infinity()), "+Inf");
  EXPECT_EQ(PrometheusNumber(0.1), "0.1");
}

TEST(Histogram, IsCumulative) {
  Histogram histogram({1, 2, 5});
  for (const double value : {0.5, 1.0, 1.5, 4.0, 100.0}) histogram.Observe(value);
  const auto snapshot = histogram.Read();
  EXPECT_EQ(snapshot.counts, (std::vector<uint64_t>{2, 1, 1, 1}));
  EXPECT_EQ(snapshot.sum, 107.0);
  PrometheusText text;
  text.Family("a", "histogram", "b");
  text.HistogramSamples({}, histogram);
  const auto samples = ReadExposition(text.Take());
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="1.0"})"), 2);
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="2.0"})"), 3);
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="5.0"})"), 4);
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="+Inf"})"), 5);
  EXPECT_EQ(samples.at("moeserve_a_count"), 5);
  EXPECT_EQ(samples.at("moeserve_a_sum"), 107.0);
}

TEST(Metrics, AreAValidExposition) {
  ServerSettings settings;
  settings.served_names = {"tiny"};
  ServerContext context(settings);
  auto samples = ReadExposition(context.MetricsText());
  EXPECT_EQ(samples.at("moeserve_engine_up"), 0);
  context.SetServing(std::make_shared<testing::FakeEngine>(), {});
  context.metrics().CountHttp("/v1/completions", "POST", 200, 0.1);
  context.metrics().CountGrpc("Generate", "OK", 0.1);
  context.metrics().CountRejected(Rejection::kInvalid);
  context.metrics().time_to_first_token.Observe(0.3);
  samples = ReadExposition(context.MetricsText());
  EXPECT_EQ(samples.at("moeserve_engine_up"), 1);
  EXPECT_EQ(
      samples.at(
          R"(moeserve_http_requests_total{endpoint="/v1/completions",method="POST",code="200"})"),
      1);
  EXPECT_EQ(samples.at(R"(moeserve_requests_rejected_total{reason="invalid"})"), 1);
  EXPECT_EQ(samples.at(R"(moeserve_time_to_first_token_seconds_bucket{le="+Inf"})"), 1);
  EXPECT_EQ(
      samples.at(
          R"(moeserve_moe_layer_rows_total{model="tiny",layer="1",block="feed_forward",phase="prefill"})"),
      6);
  EXPECT_EQ(
      samples.at(
          R"(moeserve_moe_expert_tokens_total{model="tiny",layer="1",block="feed_forward",expert="1"})"),
      6);
  EXPECT_EQ(
      samples.at(
          R"(moeserve_moe_layer_unused_experts{model="tiny",layer="1",block="feed_forward"})"),
      1);
  EXPECT_GT(samples.at("process_resident_memory_bytes"), 0);
}

TEST(MeasureLoad, KnowsTheExtremes) {
  EXPECT_DOUBLE_EQ(MeasureLoad({5, 5, 5, 5}).balance, 1.0);
  EXPECT_DOUBLE_EQ(MeasureLoad({5, 5, 5, 5}).entropy, 1.0);
  const LoadShape one = MeasureLoad({0, 8, 0, 0});
  EXPECT_DOUBLE_EQ(one.balance, 0.25);
  EXPECT_DOUBLE_EQ(one.entropy, 0.0);
  EXPECT_EQ(one.unused, 3);
  EXPECT_EQ(MeasureLoad({0, 0}).unused, 2);
}

ExpertStats Wide(int blocks, int experts) {
  ExpertStats stats;
  stats.tokens = 100;
  for (int b = 0; b < blocks; ++b) {
    BlockExpertStats block;
    block.layer = b;
    block.num_experts = experts;
    block.selections.resize(experts);
    block.expert_parameters.resize(experts, 10);
    block.selections[3] = 60;
    block.selections[5] = 40;
    stats.blocks.push_back(block);
  }
  return stats;
}

TEST(ExpertHistory, GivesWindowsAndStaysSmall) {
  ExpertHistory history;
  EXPECT_FALSE(history.Latest());
  absl::Time now = absl::UnixEpoch();
  ExpertStats stats = Wide(1, 8);
  for (int second = 0; second < 2000; ++second) {
    stats.tokens = 10 * static_cast<uint64_t>(second);
    history.Add(now, stats);
    now += absl::Seconds(1);
  }
  EXPECT_EQ(history.Latest()->tokens, 19990u);
  const auto base = history.Before(now, absl::Seconds(30));
  EXPECT_EQ(now - base->time, absl::Seconds(30));
  EXPECT_EQ(Difference(stats, base->stats).tokens, 290u);
  const auto far = history.Before(now, absl::Seconds(600));
  EXPECT_GE(now - far->time, absl::Seconds(590));
  EXPECT_LE(now - far->time, absl::Seconds(620));
}

TEST(ExpertStatsTable, HasALineForEachBlock) {
  const std::string table = ExpertStatsTable(Wide(3, 8), 0.0);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 6);
}

TEST(TextValues, Bytes) {
  EXPECT_EQ(*ParseBytes("512MiB"), 512 << 20);
  EXPECT_EQ(*ParseBytes("2gb"), 2'000'000'000);
  EXPECT_EQ(*ParseBytes("17"), 17);
  for (const char* bad : {"", "MiB", "-1", "1.5GB", "1XB", "99999999TiB", "1 GB"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
  EXPECT_EQ(ShowBytes(1536), "1.5 KiB");
}

TEST(TextValues, HostPort) {
  EXPECT_EQ(ParseHostPort("[::1]:80")->host, "::1");
  EXPECT_TRUE(ParseHostPort("[::1]:80")->IsLoopback());
  EXPECT_TRUE(ParseHostPort("127.0.0.1:0")->IsLoopback());
  EXPECT_FALSE(ParseHostPort("0.0.0.0:80")->IsLoopback());
  for (const char* bad : {"", "a", ":80", "a:", "a:x", "a:65536", "::1:80", "a:-1"}) {
    EXPECT_FALSE(ParseHostPort(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace moeserve::server

// The history of metrics behind the page's charts: which readings are kept, and the route.
#include "server/metrics/metrics_history.h"

#include <utility>
#include <vector>

#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

const absl::Time kStart = absl::UnixEpoch();

std::vector<ModelReading> Numbered(uint64_t number, const char* model = "one") {
  MetricsReading reading;
  reading.generation_tokens = number;
  return {{model, std::move(reading)}};
}

TEST(MetricsHistory, KeepsAReadingEveryTwoSecondsForFiveMinutes) {
  MetricsHistory history;
  EXPECT_TRUE(history.Due(kStart));
  EXPECT_TRUE(Json(history.ToJson(kStart))["readings"].empty());
  // The calls come once a second, each up to 0.2 seconds late.
  for (int second = 0; second <= 1000; ++second) {
    const absl::Time now = kStart + absl::Seconds(second) + absl::Milliseconds(second % 3 * 100);
    EXPECT_EQ(history.Due(now), second % 2 == 0) << second;
    history.Add(now, Numbered(static_cast<uint64_t>(second)));
  }
  const absl::Time now = kStart + absl::Seconds(1001);
  const Json readings = history.ToJson(now)["readings"];
  ASSERT_EQ(readings.size(), 151u);
  EXPECT_EQ(readings.front()["generation_tokens_total"], 700);
  EXPECT_EQ(readings.back()["generation_tokens_total"], 1000);
  EXPECT_NEAR(readings.back()["age_seconds"].get<double>(), 0.9, 1e-9);
}

TEST(MetricsHistory, ForgetsWhatIsOldAfterAPause) {
  MetricsHistory history;
  history.Add(kStart, Numbered(1));
  history.Add(kStart + absl::Hours(1), Numbered(2));
  const Json readings = history.ToJson(kStart + absl::Hours(1))["readings"];
  ASSERT_EQ(readings.size(), 1u);
  EXPECT_EQ(readings[0]["generation_tokens_total"], 2);
}

TEST(MetricsHistory, ReadingsAddTheModels) {
  EngineStats stats;
  stats.running = 2;
  stats.waiting = 3;
  stats.kv_blocks_used = 10;
  stats.kv_blocks_total = 40;
  stats.finished_stop = stats.finished_length = stats.finished_abort = stats.finished_error = 1;
  stats.prompt_tokens = 7;
  RequestMetrics requests;
  requests.time_to_first_token.Observe(0.003);
  requests.request_duration.Observe(1e9);
  MetricsReading reading;
  reading.Add(stats, requests);
  reading.Add(stats, requests);
  MetricsHistory history;
  history.Add(kStart, {{"one", std::move(reading)}});
  const Json json = history.ToJson(kStart);
  const Json& one = json["readings"][0];
  EXPECT_EQ(one["requests_running"], 4);
  EXPECT_EQ(one["requests_waiting"], 6);
  EXPECT_EQ(one["kv_cache_usage_ratio"], 0.25);
  EXPECT_EQ(one["requests_finished_total"], 8);
  EXPECT_EQ(one["prompt_tokens_total"], 14);
  for (const auto& [name, bounds] : json["bounds"].items()) {
    EXPECT_EQ(one[name].size(), bounds.size() + 1) << name;
  }
  EXPECT_EQ(json["bounds"]["time_to_first_token_seconds"][1], 0.005);
  EXPECT_EQ(one["time_to_first_token_seconds"][1], 2);
  EXPECT_EQ(one["request_duration_seconds"].back(), 2);
}

TEST(MetricsHistory, ReadingsOfOneModel) {
  MetricsHistory history;
  history.Add(kStart, Numbered(1));
  std::vector<ModelReading> both = Numbered(2);
  both.push_back(Numbered(40, "two").front());
  both.back().reading.time_to_first_token = {0, 3};
  const absl::Time later = kStart + absl::Seconds(2);
  history.Add(later, std::move(both));
  const auto tokens = [&](std::string_view model) {
    std::vector<uint64_t> out;
    const Json json = history.ToJson(later, model);
    for (const Json& reading : json["readings"]) {
      out.push_back(reading["generation_tokens_total"].get<uint64_t>());
    }
    return out;
  };
  EXPECT_EQ(tokens(""), (std::vector<uint64_t>{1, 42}));
  EXPECT_EQ(tokens("one"), (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(tokens("two"), (std::vector<uint64_t>{40}));
  EXPECT_TRUE(tokens("three").empty());
  const Json two = history.ToJson(later, "two");
  EXPECT_EQ(two["readings"][0]["time_to_first_token_seconds"], Json({0, 3}));
}

using HistoryRoute = HttpTest;

TEST_F(HistoryRoute, HasWhatTicksHaveRead) {
  Start();
  EXPECT_TRUE(Json::parse(Exchange(Get("/v1/metrics/history")).body)["readings"].empty());
  context_->Tick();
  context_->Tick();
  const RawResponse response = Exchange(Get("/v1/metrics/history"));
  EXPECT_EQ(response.status, 200);
  const Json json = Json::parse(response.body);
  EXPECT_EQ(json["interval_seconds"], 2.0);
  ASSERT_EQ(json["readings"].size(), 1u);
  EXPECT_GE(json["readings"][0]["age_seconds"], 0.0);
  const RawResponse other = Exchange(Get("/v1/metrics/history?model=none%20such"));
  EXPECT_TRUE(Json::parse(other.body)["readings"].empty());
  EXPECT_EQ(Exchange(Get("/v1/metrics/history?model=%zz")).status, 400);
}

}  // namespace
}  // namespace moeserve::server::testing

// GET /v1/experts/tokens, /similarity, /collapse and /profile.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "engine/statistics/measures/collapse.h"
#include "engine/statistics/measures/token_affinity.h"
#include "model_loaders/profiles/profile_file.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

class ExpertRoutes : public HttpTest {
 protected:
  // Token 'a' was routed 6 times to expert 0 and 2 times to expert 1, token 'b' 4 times to expert
  // 1.
  void CountTokens() {
    constexpr int kExperts = 4;
    std::vector<uint32_t> table(kVocabSize * kExperts);
    table['a' * kExperts] = 6;
    table['a' * kExperts + 1] = 2;
    table['b' * kExperts + 1] = 4;
    engine_->SetTokenCounts(
        TokenExpertCounts(kVocabSize, kExperts, [table](int64_t first, std::span<uint32_t> part) {
          std::copy_n(table.begin() + first, part.size(), part.begin());
          return absl::OkStatus();
        }));
  }

  // Sets a sample of `rows` router inputs of width 2. Rows alternate between experts 0 and 1. The
  // experts' mean rows are one unit apart, and every row is half a unit from its expert's mean.
  void SampleInputs(int rows) {
    HiddenSample sample;
    sample.width = 2;
    sample.capacity = rows;
    sample.seen = static_cast<uint64_t>(rows);
    for (int i = 0; i < rows; ++i) {
      sample.experts.push_back(i % 2);
      sample.rows.push_back(static_cast<float>(i % 2) + (i % 4 < 2 ? 0.5f : -0.5f));
      sample.rows.push_back(0.0f);
    }
    engine_->SetHiddenSample(std::move(sample));
  }

  Json Ask(const std::string& path) {
    const RawResponse response = Exchange(Get(path));
    EXPECT_EQ(response.status, 200) << path << ": " << response.body;
    return Json::parse(response.body, nullptr, false);
  }

  void ExpectError(const std::string& path, int status, const std::string& code,
                   const std::string& param = "") {
    const RawResponse response = Exchange(Get(path));
    EXPECT_EQ(response.status, status) << path;
    EXPECT_EQ(Error(response)["code"], code) << path;
    if (!param.empty()) {
      EXPECT_EQ(Error(response)["param"], param) << path;
    }
  }
};

TEST_F(ExpertRoutes, FrequentTokensOfABlock) {
  Start();
  constexpr int kExperts = 4;
  // Rows of 'x' and of 'a'; a row that no token owns yet; all other tokens.
  const std::vector<uint32_t> table = {0, 9, 0, 0, 6, 2, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0};
  engine_->SetTokenCounts(TokenExpertCounts(
      4, kExperts,
      [table](int64_t first, std::span<uint32_t> part) {
        std::copy_n(table.begin() + first, part.size(), part.begin());
        return absl::OkStatus();
      },
      [] {
        return std::vector<TokenRows::Owner>{{'x', 1}, {'a', 1}, {}};
      }));
  const Json out = Ask("/v1/experts/tokens?layer=1&min_count=1&rank=count");
  EXPECT_EQ(out["vocabulary"], kVocabSize);
  EXPECT_EQ(out["counted_tokens"], 2);
  EXPECT_EQ(out["token_stats_mib_of_all"], 1);
  ASSERT_EQ(out["experts"][1]["tokens"].size(), 2u);
  EXPECT_EQ(out["experts"][1]["tokens"][0]["id"], 'x');
  EXPECT_EQ(out["experts"][1]["tokens"][1]["id"], 'a');
  // Of 22 selections, 8 are of 'a' and 16 are of the expert.
  EXPECT_NEAR(out["experts"][1]["tokens"][1]["pmi"].get<double>(), 2.0 * 22 / (8 * 16), 1e-6);
  ExpectError("/v1/experts/similarity?layer=1", 404, "not_counted");
}

TEST_F(ExpertRoutes, TokensOfABlock) {
  Start();
  CountTokens();
  const Json out = Ask("/v1/experts/tokens?layer=1&min_count=2&top=1");
  EXPECT_EQ(out["layer"], 1);
  EXPECT_EQ(out["block"], "feed_forward");
  EXPECT_EQ(out["min_count"], 2);
  EXPECT_EQ(out["counted_tokens"], kVocabSize);
  EXPECT_FALSE(out.contains("token_stats_mib_of_all"));
  ASSERT_EQ(out["experts"].size(), 4u);
  const Json& first = out["experts"][0];
  EXPECT_EQ(first["expert"], 0);
  ASSERT_EQ(first["tokens"].size(), 1u);
  EXPECT_EQ(first["tokens"][0]["id"], 'a');
  EXPECT_EQ(first["tokens"][0]["text"], "a");
  EXPECT_EQ(first["tokens"][0]["count"], 6);
  EXPECT_DOUBLE_EQ(first["tokens"][0]["pmi"].get<double>(), 6.0 * 12.0 / (8.0 * 6.0));
  EXPECT_DOUBLE_EQ(first["tokens"][0]["log_pmi"].get<double>(), std::log(1.5));
  EXPECT_GT(first["tokens"][0]["g2"], 0.0);
  EXPECT_EQ(out["experts"][1]["tokens"][0]["id"], 'b');
  for (const std::string rank : {"pmi", "g2", "count"}) {
    const Json ranked = Ask("/v1/experts/tokens?layer=1&min_count=2&top=1&rank=" + rank);
    EXPECT_EQ(ranked["experts"][0]["tokens"][0]["id"], 'a') << rank;
  }
  EXPECT_EQ(out["experts"][2]["tokens"], Json::array());
  // By default, a token must have at least five selections.
  EXPECT_EQ(Ask("/v1/experts/tokens?layer=1")["experts"][1]["tokens"], Json::array());
}

TEST_F(ExpertRoutes, SimilarityOfABlock) {
  Start();
  CountTokens();
  const Json out = Ask("/v1/experts/similarity?layer=1&block=feed_forward&eps=0.25");
  const Json& w = out["wasserstein"]["matrix"];
  ASSERT_EQ(w.size(), 4u);
  EXPECT_NEAR(w[0][1].get<double>(), 2.0 / 3.0, 1e-12) << "two thirds of expert 1 are one id on";
  EXPECT_TRUE(w[0][2].is_null()) << "an expert without tokens has no distribution";
  EXPECT_EQ(out["kl"]["eps"], 0.25);
  const double expected = (6.25 * std::log(6.25 / 2.25) + 0.25 * std::log(0.25 / 4.25)) / 81.0;
  EXPECT_NEAR(out["kl"]["matrix"][0][1].get<double>(), expected, 1e-12);
}

TEST_F(ExpertRoutes, CollapseNeedsTheOperatorsConsent) {
  Start();
  ExpectError("/v1/experts/collapse", 404, "not_sampled");
  SampleInputs(40);
  const Json out = Ask("/v1/experts/collapse");
  ASSERT_EQ(out["layers"].size(), 1u);
  EXPECT_EQ(out["layers"][0]["layer"], 1);
  EXPECT_NEAR(out["layers"][0]["value"].get<double>(), 1.0, 1e-12);
  EXPECT_EQ(out["layers"][0]["seen"], 40);
  EXPECT_EQ(Ask("/v1/experts/collapse?layer=1"), out);
  ExpectError("/v1/experts/collapse?layer=2", 400, "invalid_value", "layer");
}

TEST_F(ExpertRoutes, CollapseWithoutClassesHasAReason) {
  Start();
  SampleInputs(1);
  const Json out = Ask("/v1/experts/collapse")["layers"][0];
  EXPECT_TRUE(out["value"].is_null());
  EXPECT_TRUE(out["reason"].is_string());
}

TEST_F(ExpertRoutes, ProfileIsOneThatCanBeRead) {
  Start();
  CountTokens();
  SampleInputs(8);
  const RawResponse response = Exchange(Get("/v1/experts/profile"));
  ASSERT_EQ(response.status, 200);
  EXPECT_EQ(response.headers.at("content-type"), "application/octet-stream");
  const auto profile = DecodeProfile(response.body);
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->model, "tiny");
  EXPECT_EQ(profile->vocabulary, kVocabSize);
  EXPECT_EQ(profile->stats.tokens, 10u);
  EXPECT_EQ(profile->token_counts[0]['a' * 4], 6u);
  EXPECT_EQ(profile->hidden[0].size(), 8);
}

TEST_F(ExpertRoutes, WhatIsNotKeptIsNotFound) {
  Start();
  ExpectError("/v1/experts/tokens?layer=1", 404, "not_counted");
  ExpectError("/v1/experts/similarity?layer=1", 404, "not_counted");
  EXPECT_EQ(Exchange(Get("/v1/experts/profile")).status, 200);
}

TEST_F(ExpertRoutes, CanBeSwitchedOff) {
  ServerSettings settings;
  settings.moe_metrics.mode = MoeMetricsMode::kOff;
  Start({}, settings);
  CountTokens();
  SampleInputs(8);
  for (const char* what : {"tokens?layer=1", "similarity?layer=1", "collapse", "profile"}) {
    ExpectError(std::string("/v1/experts/") + what, 404, "not_counted");
  }
}

TEST_F(ExpertRoutes, EveryAddressIsCountedFromTheStart) {
  Start();
  const std::string metrics = Exchange(Get("/metrics")).body;
  for (const char* address : {"/v1/experts/stats", "/v1/experts/tokens", "/v1/experts/similarity",
                              "/v1/experts/collapse", "/v1/experts/profile", "/", "/dashboard/*"}) {
    EXPECT_NE(metrics.find(std::string("moeserve_http_requests_total{endpoint=\"") + address +
                           "\",method=\"GET\",code=\"500\"} 0\n"),
              std::string::npos)
        << address;
  }
}

TEST_F(ExpertRoutes, QuestionsAreChecked) {
  Start();
  CountTokens();
  SampleInputs(8);
  ExpectError("/v1/experts/tokens", 400, "missing_field", "layer");
  ExpectError("/v1/experts/tokens?layer=0", 400, "invalid_value", "layer");
  ExpectError("/v1/experts/tokens?layer=1&block=attention", 400, "invalid_value", "layer");
  ExpectError("/v1/experts/tokens?layer=1&block=x", 400, "invalid_value", "block");
  ExpectError("/v1/experts/collapse?block=attention", 400, "invalid_value", "block");
  for (const char* bad : {"-1", "1.5", "", "x", "99999999999999999999"}) {
    ExpectError(std::string("/v1/experts/tokens?layer=") + bad, 400, "invalid_value", "layer");
  }
  ExpectError("/v1/experts/tokens?layer=1&top=0", 400, "invalid_value", "top");
  ExpectError("/v1/experts/tokens?layer=1&top=1001", 400, "invalid_value", "top");
  ExpectError("/v1/experts/tokens?layer=1&min_count=0", 400, "invalid_value", "min_count");
  for (const char* bad : {"0", "-1", "nan", "inf", "1e7"}) {
    ExpectError(std::string("/v1/experts/similarity?layer=1&eps=") + bad, 400, "invalid_value",
                "eps");
  }
}

TEST_F(ExpertRoutes, KeysGuardThem) {
  ServerSettings settings;
  settings.keys = PlainKeys({"secret"});
  Start({}, settings);
  for (const char* path : {"tokens?layer=1", "similarity?layer=1", "collapse", "profile"}) {
    EXPECT_EQ(Exchange(Get(std::string("/v1/experts/") + path)).status, 401) << path;
  }
}

TEST_F(ExpertRoutes, NothingBeforeTheModelIsThere) {
  Start({}, {}, /*serving=*/false);
  for (const char* path : {"tokens?layer=1", "similarity?layer=1", "collapse", "profile"}) {
    ExpectError(std::string("/v1/experts/") + path, 503, "loading");
  }
}

TEST_F(ExpertRoutes, UnreadProfilesAreFew) {
  Start();
  SampleInputs(2'000'000);  // 24 MB, more than socket buffers can take
  const auto status_becomes = [&](int status, int tries) {
    for (int i = 0; i < tries; ++i) {
      if (Exchange(Get("/v1/experts/profile")).status == status) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
    }
    return false;
  };
  // These clients read nothing. One that asks at the same time as Exchange() can be refused.
  std::vector<std::unique_ptr<RawClient>> clients;
  bool full = false;
  for (int i = 0; i < 10 && !full; ++i) {
    clients.push_back(std::make_unique<RawClient>(port(), 4096));
    clients.back()->Send(Get("/v1/experts/profile"));
    full = status_becomes(503, 5);
  }
  EXPECT_TRUE(full) << "two are being sent";
  EXPECT_GE(clients.size(), 2u);
  clients.clear();
  EXPECT_TRUE(status_becomes(200, 200)) << "a client that has left gives its place back";
}

TEST_F(ExpertRoutes, StatsHaveWhatFollowsFromTheCounters) {
  Start();
  const Json stats = Ask("/v1/experts/stats?threshold=0.5");
  EXPECT_EQ(stats["diversity"], (Json{{"mean", 2.0}, {"blocks", 1}, {"histogram", {0, 0, 10}}}));
  EXPECT_DOUBLE_EQ(stats["activated_parameters"]["compute"].get<double>(), 1200.0);
  EXPECT_EQ(stats["recomputed_tokens"], 0);
  const Json& layer = stats["layers"][0];
  EXPECT_EQ(layer["decode_counts"], Json({4, 2, 2, 0}));
  EXPECT_EQ(layer["touching_tokens"], Json({10, 6, 4, 0}));
  EXPECT_EQ(layer["recomputed"]["counts"], Json({0, 0, 0, 0}));
  EXPECT_EQ(layer["activated_experts"], 2);
  EXPECT_EQ(layer["load_share"], Json({0.5, 0.3, 0.2, 0.0}));
  EXPECT_EQ(layer["router"]["rows"], 5);
  EXPECT_DOUBLE_EQ(layer["router"]["entropy_mean"].get<double>(), 1.0);
  EXPECT_DOUBLE_EQ(layer["router"]["z_loss"].get<double>(), 2.0);
}

}  // namespace
}  // namespace moeserve::server::testing

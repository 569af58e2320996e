// The HTTP server's framing, limits and API keys, and the routes that other tests do not cover.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <string_view>
#include <thread>

#include "absl/time/clock.h"
#include "base/steady_clock.h"
#include "server/generation/engine_watchdog.h"
#include "server/http/checks/head_check.h"
#include "server/http/request_parser.h"
#include "server/http/response_head.h"
#include "server/http/url.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;
using Protocol = HttpTest;
using Routes = HttpTest;

TEST_F(Protocol, RequestIdsAreEchoedOnlyIfHarmless) {
  Start();
  EXPECT_EQ(Exchange(Get("/version", "X-Request-Id: abc-1._Z\r\n")).headers.at("x-request-id"),
            "abc-1._Z");
  for (const std::string& id : {std::string("a b"), std::string("<x>"), std::string(129, 'a')}) {
    const std::string got =
        Exchange(Get("/version", "X-Request-Id: " + id + "\r\n")).headers.at("x-request-id");
    EXPECT_NE(got, id);
    EXPECT_EQ(got.size(), 24u);
  }
  EXPECT_TRUE(Exchange(Get("/nowhere")).headers.contains("x-request-id"));
  EXPECT_TRUE(Exchange("bad\r\n\r\n").headers.contains("x-request-id"));
}

TEST_F(Protocol, ResponseIdsDeriveFromTheRequestId) {
  Start();
  const std::string body = R"({"prompt": "a", "max_tokens": 1})";
  const auto id = [&](const std::string& text, const std::string& headers) {
    const RawResponse response = Complete(text, headers);
    EXPECT_EQ("cmpl-" + response.headers.at("x-request-id"), Json::parse(response.body)["id"]);
    return response.headers.at("x-request-id");
  };
  EXPECT_EQ(id(body, "X-Request-Id: abc-1._Z\r\n"), "abc-1._Z");
  EXPECT_EQ(id(body, "X-Request-Id: a b\r\n").size(), 24u);
  EXPECT_NE(id(body, ""), id(body, ""));
  const RawResponse named = Complete(R"({"prompt": "a", "max_tokens": 1, "request_id": "mine"})",
                                     "X-Request-Id: other\r\n");
  EXPECT_EQ(Json::parse(named.body)["id"], "cmpl-mine") << "the body's field comes first";
  EXPECT_EQ(named.headers.at("x-request-id"), "other");
  const RawResponse stream =
      Complete(R"({"prompt": "a", "max_tokens": 1, "stream": true})", "X-Request-Id: s\r\n");
  for (const Json& event : Events(stream.body)) {
    if (event.is_object()) {
      EXPECT_EQ(event["id"], "cmpl-s");
    }
  }
}

TEST_F(Protocol, RequestsWithEqualIdsRunTogether) {
  Script script;
  script.held = true;
  Start(script);
  const std::string body = R"({"prompt": "a", "max_tokens": 1})";
  RawClient first(port());
  RawClient second(port());
  first.Send(Post("/v1/completions", body, "X-Request-Id: same\r\n"));
  second.Send(Post("/v1/completions", body, "X-Request-Id: same\r\n"));
  ASSERT_TRUE(engine_->WaitForActive(2));
  engine_->Release();
  EXPECT_EQ(first.ReadResponse().status, 200);
  EXPECT_EQ(second.ReadResponse().status, 200);
}

TEST_F(Protocol, TraceContextIsContinued) {
  Start();
  const std::string trace = "0af7651916cd43dd8448eb211c80319c";
  const std::string parent = "traceparent: 00-" + trace + "-b7ad6b7169203331-01\r\n";
  const auto header = [&](const std::string& headers, const char* path = "/version") {
    const RawResponse response = Exchange(Get(path, headers));
    const auto it = response.headers.find("traceparent");
    return it == response.headers.end() ? std::string() : it->second;
  };
  const std::string first = header(parent);
  ASSERT_EQ(first.size(), 55u);
  EXPECT_TRUE(first.starts_with("00-" + trace + "-") && first.ends_with("-01")) << first;
  EXPECT_EQ(first.find("b7ad6b7169203331"), std::string::npos) << "it names the server's own span";
  EXPECT_NE(header(parent), first);
  EXPECT_TRUE(header(parent, "/nowhere").starts_with("00-" + trace)) << "errors, too";
  EXPECT_EQ(header(""), "") << "the client has no trace";
  EXPECT_EQ(header("traceparent: 00-" + trace + "-b7ad6b7169203331\r\n"), "");
  EXPECT_EQ(header(parent + parent), "");
  const RawResponse stream =
      Complete(R"({"prompt": "a", "max_tokens": 1, "stream": true})", parent);
  EXPECT_TRUE(stream.headers.at("traceparent").starts_with("00-" + trace));
}

TEST_F(Protocol, KeepsConnectionsAndAnswersPipelinedRequests) {
  Start();
  RawClient client(port());
  client.Send(Get("/version") + Post("/v1/completions", R"({"prompt": "a"})") + Get("/health"));
  EXPECT_EQ(client.ReadResponse().status, 200);
  EXPECT_EQ(Json::parse(client.ReadResponse().body)["choices"][0]["text"], "hello");
  EXPECT_EQ(client.ReadResponse().status, 200);
  client.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true})"));
  EXPECT_TRUE(client.ReadResponse().complete);
  client.Send(Get("/version", "Connection: close\r\n"));
  const RawResponse last = client.ReadResponse();
  EXPECT_EQ(last.headers.at("connection"), "close");
  EXPECT_TRUE(client.IsClosed());
}

TEST_F(Protocol, Http10GetsNoChunks) {
  Start();
  RawClient client(port());
  const std::string body = R"({"prompt": "a", "stream": true})";
  client.Send(
      "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body);
  const RawResponse response = client.ReadResponse();
  EXPECT_FALSE(response.headers.contains("transfer-encoding"));
  EXPECT_NE(response.body.find("[DONE]"), std::string::npos);
}

TEST_F(Protocol, HeadHasNoBody) {
  Start();
  RawClient client(port());
  client.Send("HEAD /version HTTP/1.1\r\nHost: a\r\n\r\n" + Get("/version"));
  const RawResponse head = client.ReadResponse(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_NE(head.headers.at("content-length"), "0");
  EXPECT_EQ(client.ReadResponse().status, 200);
}

TEST_F(Protocol, ChunkedBodiesInAnyPieces) {
  Start();
  const std::string request =
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json; "
      "charset=utf-8\r\n"
      "Transfer-Encoding: chunked\r\n\r\n"
      "5\r\n{\"pro\r\nA;name=value\r\nmpt\": \"abc\r\n2\r\n\"}\r\n0\r\n\r\n";
  EXPECT_EQ(Exchange(request).status, 200);
  RawClient client(port());
  for (const char c : request) {
    client.Send(std::string(1, c));
    if (c == '\n') std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(client.ReadResponse().status, 200);
}

TEST_F(Protocol, ExpectIsAnsweredAfterTheChecks) {
  Start();
  const std::string body = R"({"prompt": "a"})";
  RawClient client(port());
  const std::string whole = Post("/v1/completions", body, "Expect: 100-continue\r\n");
  client.Send(whole.substr(0, whole.size() - body.size()));
  EXPECT_EQ(client.ReadResponse().status, 100);
  client.Send(body);
  EXPECT_EQ(client.ReadResponse().status, 200);
  RawClient refused(port());
  refused.Send(
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\n"
      "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n");
  EXPECT_EQ(refused.ReadResponse().status, 415);
}

TEST_F(Protocol, AmbiguousFramingIsRefusedAndClosed) {
  Start();
  const std::string head =
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
      "Content-Type: application/json\r\n";
  const std::string attacks[] = {
      head + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      head + "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
      head + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
      head + "Content-Length: 2, 2\r\n\r\n{}",
      head + "Content-Length: +2\r\n\r\n{}",
      head + "Content-Length: -2\r\n\r\n{}",
      head + "Content-Length: 0x2\r\n\r\n{}",
      head + "Content-Length:\r\n\r\n",
      head + "Content-Length: 99999999999999999999999\r\n\r\n{}",
      head + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
      head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
      head + "Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
      head + "Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
      head + "Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
      head + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
      head + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
      head + "Content-Length : 2\r\n\r\n{}",
      head + "X-A: b\r\n folded\r\nContent-Length: 2\r\n\r\n{}",
      head + "X-A: b\nContent-Length: 2\r\n\r\n{}",
      head + std::string("X-A: b\0c\r\n", 10) + "Content-Length: 2\r\n\r\n{}",
      head + "X-A: b\rc\r\nContent-Length: 2\r\n\r\n{}",
      head + "Authorization: Bearer a\r\nauthorization: Bearer b\r\nContent-Length: 2\r\n\r\n{}",
      head + "no colon\r\n\r\n",
      head + ": empty\r\n\r\n",
      "GET /version HTTP/1.1\r\n\r\n",
      "GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
      "GET /version HTTP/1.1\nHost: a\n\n",
      "GET  /version HTTP/1.1\r\nHost: a\r\n\r\n",
      "GET /version\r\n\r\n",
      "GET /version HTTP/2.0\r\nHost: a\r\n\r\n",
      "GET /ver sion HTTP/1.1\r\nHost: a\r\n\r\n",
      "G\x01T /version HTTP/1.1\r\nHost: a\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),
  };
  for (const std::string& attack : attacks) {
    RawClient client(port());
    client.Send(attack);
    const RawResponse response = client.ReadResponse();
    const int expected = attack.find("9999") != std::string::npos ? 413 : 400;
    EXPECT_TRUE(response.status == 400 || response.status == expected)
        << response.status << " for " << attack;
    EXPECT_TRUE(client.IsClosed(std::chrono::seconds(3))) << attack;
  }
  EXPECT_EQ(engine_->submitted().size(), 0u);
}

TEST_F(Protocol, LimitsOfTheHead) {
  Start();
  EXPECT_EQ(Exchange(Get("/" + std::string(9000, 'a'))).status, 414);
  EXPECT_EQ(Exchange(Get("/version", "X-A: " + std::string(9000, 'a') + "\r\n")).status, 431);
  std::string many;
  for (int i = 0; i < 101; ++i) many += "X-" + std::to_string(i) + ": a\r\n";
  EXPECT_EQ(Exchange(Get("/version", many)).status, 431);
  std::string large;
  for (int i = 0; i < 5; ++i) large += "X-A: " + std::string(8000, 'a') + "\r\n";
  EXPECT_EQ(Exchange(Get("/version", large)).status, 431);
  RawClient endless(port());
  endless.Send("GET /" + std::string(20000, 'a'));
  EXPECT_EQ(endless.ReadResponse().status, 414);
}

TEST_F(Protocol, LimitsOfTheBody) {
  ServerSettings settings;
  settings.http.max_body_bytes = 1000;
  settings.http.max_chunks = 10;
  settings.http.max_chunk_extension_bytes = 100;
  Start({}, settings);
  RawResponse response = Exchange(Post("/v1/completions", std::string(1001, ' ')));
  EXPECT_EQ(response.status, 413);
  EXPECT_EQ(Error(response)["code"], "body_too_large");
  const std::string head =
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
      "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(Exchange(head + "400\r\n" + std::string(1024, ' ') + "\r\n0\r\n\r\n").status, 413);
  std::string chunks;
  for (int i = 0; i < 12; ++i) chunks += "1\r\n \r\n";
  EXPECT_EQ(Exchange(head + chunks).status, 400);
  EXPECT_EQ(Exchange(head + "1;" + std::string(200, 'x') + "\r\n \r\n").status, 400);
  EXPECT_EQ(Exchange(head + std::string(10000, '0')).status, 400);
}

TEST_F(Protocol, SlowSendersAreTimedOut) {
  ServerSettings settings;
  settings.http.header_timeout = absl::Milliseconds(100);
  settings.http.body_idle_timeout = absl::Milliseconds(100);
  settings.http.keep_alive_timeout = absl::Milliseconds(150);
  Start({}, settings);
  RawClient head(port());
  head.Send("GET /version HT");
  EXPECT_EQ(head.ReadResponse().status, 408);
  RawClient body(port());
  body.Send(
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
      "Content-Length: 10\r\n\r\n{");
  EXPECT_EQ(body.ReadResponse().status, 408);
  RawClient idle(port());
  idle.Send(Get("/version"));
  EXPECT_EQ(idle.ReadResponse().status, 200);
  EXPECT_TRUE(idle.IsClosed());
  EXPECT_TRUE(idle.received().empty()) << "an idle connection is closed silently";
}

TEST_F(Protocol, MediaTypes) {
  Start();
  const auto post = [&](const std::string& headers) {
    return Exchange("POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + headers +
                    "Content-Length: 15\r\n\r\n{\"prompt\": \"a\"}")
        .status;
  };
  EXPECT_EQ(post(""), 415);
  EXPECT_EQ(post("Content-Type: text/plain\r\n"), 415);
  EXPECT_EQ(post("Content-Type: application/jsonx\r\n"), 415);
  EXPECT_EQ(post("Content-Type: Application/JSON ; charset=utf-8\r\n"), 200);
  EXPECT_EQ(post("Content-Type: application/json\r\nContent-Encoding: br\r\n"), 415);
}

TEST_F(Protocol, UnknownRoutesAndVerbs) {
  Start();
  RawResponse response = Exchange(Get("/nowhere"));
  EXPECT_EQ(response.status, 404);
  EXPECT_TRUE(Error(response)["code"].is_null());
  response = Exchange(Get("/v1/completions"));
  EXPECT_EQ(response.status, 405);
  EXPECT_EQ(response.headers.at("allow"), "POST");
  EXPECT_EQ(Error(response)["code"], "method_not_allowed");
  EXPECT_EQ(Exchange("OPTIONS /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").status, 204);
  EXPECT_FALSE(Exchange("OPTIONS /v1/models HTTP/1.1\r\nHost: a\r\nOrigin: http://x\r\n\r\n")
                   .headers.contains("access-control-allow-origin"));
}

TEST_F(Protocol, KeysGuardEverythingButHealth) {
  ServerSettings settings;
  settings.keys = PlainKeys({"first", "second"});
  Start({}, settings);
  for (const char* path : {"/v1/models", "/v1/experts/stats", "/nowhere"}) {
    const RawResponse response = Exchange(Get(path));
    EXPECT_EQ(response.status, 401) << path;
    EXPECT_EQ(response.headers.at("www-authenticate"), "Bearer");
    EXPECT_EQ(Error(response)["type"], "authentication_error");
  }
  EXPECT_EQ(Exchange(Post("/tokenize", R"({"prompt": "a"})")).status, 401);
  for (const char* path : {"/health", "/health/live", "/v2/health/ready", "/version", "/metrics"}) {
    EXPECT_EQ(Exchange(Get(path)).status, 200) << path;
  }
  for (const char* value : {"Bearer first", "bearer second", "Bearer  first "}) {
    EXPECT_EQ(Exchange(Get("/v1/models", std::string("Authorization: ") + value + "\r\n")).status,
              200);
  }
  for (const char* value :
       {"Bearer", "Bearer ", "Bearer firs", "Bearer firstfirst", "Basic first"}) {
    EXPECT_EQ(Exchange(Get("/v1/models", std::string("Authorization: ") + value + "\r\n")).status,
              401)
        << value;
  }
}

TEST_F(Routes, Models) {
  ServerSettings settings;
  settings.served_names = {"tiny", "org/tiny"};
  Start({}, settings);
  const Json list = Json::parse(Exchange(Get("/v1/models")).body);
  EXPECT_EQ(list["object"], "list");
  ASSERT_EQ(list["data"].size(), 2u);
  EXPECT_EQ(list["data"][1]["id"], "org/tiny");
  EXPECT_EQ(list["data"][1]["root"], "tiny");
  EXPECT_EQ(list["data"][1]["max_model_len"], 256);
  for (const char* path : {"/v1/models/tiny", "/v1/models/org/tiny", "/v1/models/org%2Ftiny"}) {
    EXPECT_EQ(Exchange(Get(path)).status, 200) << path;
  }
  EXPECT_EQ(Error(Exchange(Get("/v1/models/other")))["code"], "model_not_found");
  EXPECT_EQ(Exchange(Get("/v1/models/%zz")).status, 400);
}

TEST_F(Routes, TokenizeAndBack) {
  Start();
  engine_->mutable_tokenizer().add_bos = true;
  const Json all = Json::parse(
      Exchange(Post("/tokenize", R"({"prompt": "ab", "return_token_strs": true})")).body);
  EXPECT_EQ(all, Json({{"count", 3},
                       {"max_model_len", 256},
                       {"tokens", {257, 97, 98}},
                       {"token_strs", {"<bos>", "a", "b"}}}));
  EXPECT_EQ(
      Json::parse(Exchange(Post("/tokenize", R"({"prompt": "ab", "add_special_tokens": false})"))
                      .body)["count"],
      2);
  EXPECT_EQ(Json::parse(Exchange(Post("/detokenize", R"({"tokens": [97, 98]})")).body)["prompt"],
            "ab");
  EXPECT_EQ(Exchange(Post("/detokenize", R"({"tokens": [300]})")).status, 400);
  EXPECT_EQ(Exchange(Post("/detokenize", R"({})")).status, 400);
  EXPECT_EQ(Exchange(Post("/tokenize", R"({"prompt": "a", "model": "b"})")).status, 404);
}

TEST_F(Routes, VersionSaysWhatWasBuilt) {
  Start();
  EXPECT_TRUE(Json::parse(Exchange(Get("/version")).body)["commit"].is_null());
  server_.reset();
  ServerSettings settings;
  settings.commit = "0123abc-dirty";
  Start({}, settings);
  EXPECT_EQ(Json::parse(Exchange(Get("/version")).body)["commit"], "0123abc-dirty");
}

TEST_F(Routes, ExpertStatisticsCanBeSwitchedOff) {
  ServerSettings settings;
  settings.moe_metrics.mode = MoeMetricsMode::kOff;
  Start({}, settings);
  const RawResponse off = Exchange(Get("/v1/experts/stats"));
  EXPECT_EQ(off.status, 404);
  EXPECT_TRUE(Error(off)["code"].is_null());
  context_->Tick();
  EXPECT_EQ(Exchange(Get("/metrics")).body.find("_moe_"), std::string::npos);
}

TEST_F(Routes, MetricsReadTheExpertsAgainWhenARequestHasEnded) {
  Start();
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(Complete(R"({"prompt": "a"})").status, 200);
    const int before = engine_->snapshots();
    Exchange(Get("/metrics"));
    EXPECT_GT(engine_->snapshots(), before);
  }
}

TEST_F(Routes, MetricsReadTheExpertsSeldomOtherwise) {
  Start();
  Exchange(Get("/metrics"));
  const int before = engine_->snapshots();
  const absl::Time begin = SteadyNow();
  for (int i = 0; i < 50; ++i) Exchange(Get("/metrics"));
  const absl::Duration elapsed = SteadyNow() - begin;
  EXPECT_LE(engine_->snapshots() - before, 1 + elapsed / absl::Milliseconds(50));
  absl::SleepFor(absl::Milliseconds(60));
  const int idle = engine_->snapshots();
  Exchange(Get("/metrics"));
  EXPECT_GT(engine_->snapshots(), idle);
}

TEST_F(Routes, MetricsComeInTheFormatThatIsAskedFor) {
  Start();
  const RawResponse text = Exchange(Get("/metrics"));
  EXPECT_EQ(text.headers.at("content-type"), "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_EQ(text.body.find("# EOF"), std::string::npos);
  const RawResponse open_metrics =
      Exchange(Get("/metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n"));
  EXPECT_EQ(open_metrics.headers.at("content-type"),
            "application/openmetrics-text; version=1.0.0; charset=utf-8");
  EXPECT_TRUE(open_metrics.body.ends_with("# EOF\n"));
}

TEST_F(Routes, ExpertStatistics) {
  Start();
  const Json stats = Json::parse(Exchange(Get("/v1/experts/stats")).body);
  EXPECT_TRUE(stats["window_seconds"].is_null());
  EXPECT_EQ(stats["tokens"], 10);
  ASSERT_EQ(stats["layers"].size(), 1u);
  EXPECT_EQ(stats["layers"][0]["layer"], 1);
  EXPECT_EQ(stats["layers"][0]["block"], "feed_forward");
  EXPECT_EQ(stats["layers"][0]["rows"], 10);
  EXPECT_EQ(stats["layers"][0]["counts"], Json({10, 6, 4, 0}));
  EXPECT_EQ(stats["layers"][0]["distinct_experts_mean"], 2.0);
  context_->Tick();
  const Json window = Json::parse(Exchange(Get("/v1/experts/stats?window=60&threshold=0.5")).body);
  EXPECT_EQ(window["tokens"], 0);
  EXPECT_TRUE(window["window_seconds"].is_number());
  EXPECT_EQ(Exchange(Get("/v1/experts/stats?window=abc")).status, 400);
  EXPECT_EQ(Exchange(Get("/v1/experts/stats?window=0")).status, 400);
}

TEST_F(Routes, HealthFollowsTheState) {
  Start({}, {}, /*serving=*/false);
  EXPECT_EQ(Error(Exchange(Get("/health")))["code"], "loading");
  EXPECT_EQ(Error(Complete(R"({"prompt": "a"})"))["code"], "loading");
  EXPECT_EQ(Exchange(Get("/health/live")).status, 200);
  EXPECT_EQ(Exchange(Get("/v1/models")).status, 200);
  EXPECT_EQ(Exchange(Get("/metrics")).status, 200);
  context_->SetServing(engine_, {});
  EXPECT_EQ(Exchange(Get("/health")).status, 200);
  EXPECT_EQ(Exchange(Get("/health/ready")).status, 200);
  engine_->SetHealthy(false);
  EXPECT_EQ(Error(Exchange(Get("/health")))["code"], "engine_dead");
  EXPECT_EQ(Exchange(Get("/health/live")).status, 503);
  engine_->SetHealthy(true);
  context_->SetDraining();
  const RawResponse draining = Complete(R"({"prompt": "a"})");
  EXPECT_EQ(draining.status, 503);
  EXPECT_EQ(Error(draining)["code"], "draining");
  EXPECT_TRUE(draining.headers.contains("retry-after"));
  EXPECT_EQ(Exchange(Get("/health/live")).status, 200);
}

TEST_F(Routes, AStuckEngineIsReportedUntilItGoesOn) {
  Script script;
  script.endless = true;
  script.delay = absl::Milliseconds(5);
  Start(script);
  const EngineWatchdog watchdog(engine_, absl::Milliseconds(100), [&](bool stuck) {
    (*context_->models().Find("tiny"))->SetEngineStuck(stuck);
  });
  RawClient stream(port());
  stream.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true, "max_tokens": 250})"));
  ASSERT_TRUE(stream.ReadUntil("data: "));
  RawClient unary(port());
  unary.Send(Post("/v1/completions", R"({"prompt": "a", "max_tokens": 250})"));
  ASSERT_TRUE(engine_->WaitForActive(2));
  engine_->SetStuck(true);
  // The engine's thread cannot end these requests.
  const RawResponse refused = unary.ReadResponse();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(Error(refused)["code"], "engine_stuck");
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  const RawResponse cut = stream.ReadResponse();
  EXPECT_TRUE(cut.complete);
  EXPECT_EQ(Events(cut.body).back()["error"]["code"], "engine_stuck");
  for (const char* path : {"/health", "/health/ready", "/health/live"}) {
    const RawResponse health = Exchange(Get(path));
    EXPECT_EQ(health.status, 503) << path;
    EXPECT_EQ(Error(health)["code"], "engine_stuck") << path;
  }
  EXPECT_EQ(Error(Complete(R"({"prompt": "a"})"))["code"], "engine_stuck");
  EXPECT_NE(Exchange(Get("/metrics")).body.find("\nmoeserve_engine_up{model=\"tiny\"} 0\n"),
            std::string::npos);

  engine_->SetScript({});
  engine_->SetStuck(false);
  EXPECT_TRUE(engine_->WaitForCancelled(2));
  for (int i = 0; i < 5000 && Exchange(Get("/health")).status != 200; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(Exchange(Get("/health/live")).status, 200);
  EXPECT_NE(Exchange(Get("/metrics")).body.find("\nmoeserve_engine_up{model=\"tiny\"} 1\n"),
            std::string::npos);
  const RawResponse answer = Complete(R"({"prompt": "a"})");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(Json::parse(answer.body)["choices"][0]["text"], "hello");
}

TEST_F(Routes, AnIdleEngineIsNotStuck) {
  Start();
  std::atomic<int> changes{0};
  const EngineWatchdog watchdog(engine_, absl::Milliseconds(10), [&](bool) { ++changes; });
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(changes, 0);
}

TEST_F(Routes, StopWaitsForRunningAnswers) {
  Script script;
  script.delay = absl::Milliseconds(40);
  Start(script);
  RawClient idle(port());
  idle.Send(Get("/version"));
  EXPECT_EQ(idle.ReadResponse().status, 200);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true})"));
  ASSERT_TRUE(client.ReadUntil("data: "));
  std::thread stopper([&] { server_->Stop(absl::Seconds(10)); });
  const RawResponse response = client.ReadResponse();
  EXPECT_TRUE(response.complete);
  EXPECT_NE(response.body.find("[DONE]"), std::string::npos);
  stopper.join();
  EXPECT_TRUE(idle.IsClosed());
  EXPECT_TRUE(client.IsClosed());
}

TEST(Url, Pieces) {
  EXPECT_EQ(http::PercentDecode("a%2Fb"), "a/b");
  EXPECT_EQ(http::PercentDecode("a+b"), "a+b");
  EXPECT_EQ(http::FormDecode("a+b%2Bc%20d"), "a b+c d");
  for (const char* bad : {"%", "%2", "%zz", "%00", "a%"}) EXPECT_FALSE(http::PercentDecode(bad));
  EXPECT_EQ(*http::QueryNumber("a=1&window=60", "window", 1, 100), 60.0);
  EXPECT_FALSE(http::QueryNumber("a=1", "window", 1, 100)->has_value());
  for (const char* bad : {"window=", "window", "window=nan", "window=1x", "window=101"}) {
    EXPECT_FALSE(http::QueryNumber(bad, "window", 1, 100).ok()) << bad;
  }
}

// Reads one request of which `step` bytes arrive at a time. Returns whether it is accepted.
bool Accepts(std::string_view bytes, size_t step) {
  const HttpLimits limits;
  std::string buffer;
  const auto more = [&] {
    buffer += bytes.substr(0, step);
    bytes.remove_prefix(std::min(step, bytes.size()));
  };
  http::HeadSearch head;
  while (!head.size && !head.refusal && !bytes.empty()) {
    more();
    head = http::FindHead(buffer, limits);
  }
  if (!head.size) return false;
  http::RequestParser parser(limits);
  if (parser.Put(buffer, *head.size)) return false;
  parser.TakeBodyInParts();
  while (!parser.is_done()) {
    if (parser.PutBody(buffer)) return false;
    if (!parser.is_done() && bytes.empty()) return false;
    more();
  }
  return true;
}

TEST(RequestParser, HowTheBytesOfAHeadArriveChangesNothing) {
  const size_t longest = HttpLimits().max_line_bytes;
  for (const size_t size : {longest, longest + 1}) {
    const std::string host = "Host: a\r\n\r\n";
    const std::string line = "GET /" + std::string(size - 14, 'a') + " HTTP/1.1";
    ASSERT_EQ(line.size(), size);
    const std::string header = "Long: " + std::string(size - 6, 'a');
    for (const size_t step : {size_t{1}, size + 1, size_t{100'000}}) {
      EXPECT_EQ(Accepts(line + "\r\n" + host, step), size == longest) << step;
      EXPECT_EQ(Accepts("GET / HTTP/1.1\r\n" + header + "\r\n" + host, step), size == longest)
          << step;
    }
  }
}

TEST(RequestParser, HowTheLinesOfAChunkedBodyArriveChangesNothing) {
  const std::string head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const size_t size : {8000, 9000}) {
    const std::string text(size, '0');
    const std::string number = text + "3\r\nabc\r\n0\r\n\r\n";
    const std::string trailer = "3\r\nabc\r\n0\r\nTrailer: " + text + "\r\n\r\n";
    for (const size_t step : {1, 1000, 8192, 100'000}) {
      EXPECT_EQ(Accepts(head + number, step), size == 8000) << step;
      EXPECT_EQ(Accepts(head + trailer, step), size == 8000) << step;
    }
  }
}

TEST(ResponseHead, Chunks) {
  std::string out;
  http::AppendChunk("", out);
  EXPECT_EQ(out, "");
  http::AppendChunk(std::string(26, 'a'), out);
  EXPECT_EQ(out, "1a\r\n" + std::string(26, 'a') + "\r\n");
}

}  // namespace
}  // namespace moeserve::server::testing

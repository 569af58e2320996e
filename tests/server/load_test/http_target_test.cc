#include "server/bench/load_test/http_target.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <set>
#include <thread>

#include "nlohmann/json.hpp"
#include "server/bench/load_test/driver.h"
#include "server/bench/load_test/load_report.h"
#include "tests/server/http_fixture.h"
#include "tests/server/load_test/scripted_server.h"

namespace moeserve::server {
namespace {

using testing::Chunk;
using testing::CompletionEvents;
using testing::kLastChunk;
using testing::kStreamHead;
using testing::Peer;
using testing::ScriptedServer;

Workload HttpWorkload(int output = 5) {
  return *Workload::Create({.prompt = {3, 6}, .output = {output, output}, .vocab_size = 100});
}

std::unique_ptr<HttpTarget> Target(const std::string& url, double timeout = 30.0) {
  HttpTargetOptions options;
  options.url = *ParseBaseUrl(url);
  options.timeout_seconds = timeout;
  auto target = HttpTarget::Create(options);
  EXPECT_TRUE(target.ok()) << target.status();
  return *std::move(target);
}

LoadRun RunClosed(HttpTarget& target, int clients, int64_t requests) {
  return RunLoad({.clients = clients, .requests = requests, .error_pause = 0.0}, HttpWorkload(),
                 target);
}

// Returns the result of the only request to a server with this handler.
RequestResult OneResult(const ScriptedServer::Handler& handler, double timeout = 30.0) {
  ScriptedServer server(handler);
  const auto target = Target(server.url(), timeout);
  const LoadRun run = RunClosed(*target, 1, 1);
  EXPECT_EQ(run.samples.size(), 1u);
  EXPECT_EQ(run.samples[0].results, 1);
  return run.samples[0].result;
}

TEST(HttpTargetTest, ReadsAStreamAndKeepsTheConnection) {
  ScriptedServer server(
      [](Peer& peer, const std::string& request) {
        const auto body = nlohmann::json::parse(request.substr(request.find("\r\n\r\n")));
        EXPECT_TRUE(request.starts_with("POST /v1/completions HTTP/1.1\r\n"));
        EXPECT_EQ(body["model"], "scripted");
        EXPECT_EQ(body["ignore_eos"], true);
        EXPECT_EQ(body["stream"], true);
        EXPECT_TRUE(body["prompt"].is_array());
        peer.SendStream(CompletionEvents(body["max_tokens"]));
        return true;
      },
      "moeserve_engine_steps_total 41\n");
  const auto target = Target(server.url());
  const LoadRun run = RunClosed(*target, 1, 50);
  EXPECT_EQ(run.unanswered + run.answered_twice + run.cut_off, 0);
  for (const LoadSample& sample : run.samples) {
    EXPECT_EQ(sample.result.error, "");
    EXPECT_EQ(sample.result.output_tokens, 5);
    EXPECT_EQ(sample.result.prompt_tokens, 9);
    ASSERT_EQ(sample.result.arrivals.size(), 5u);
    EXPECT_LE(sample.result.start, sample.result.arrivals.front());
    EXPECT_LE(sample.result.arrivals.back(), sample.result.end);
  }
  EXPECT_EQ(server.connections(), 1);
  const auto counters = target->Counters();
  ASSERT_TRUE(counters.ok());
  EXPECT_EQ(counters->steps, 41.0);
}

TEST(HttpTargetTest, PiecesMayBeSplitAnywhere) {
  const std::string events = CompletionEvents(5);
  for (const size_t size : {1, 2, 3, 7, 64}) {
    std::string stream = kStreamHead;
    for (size_t at = 0; at < events.size(); at += 11) stream += Chunk(events.substr(at, 11));
    stream += kLastChunk;
    const RequestResult result = OneResult([&](Peer& peer, const std::string&) {
      peer.SendSlowly(stream, size);
      return true;
    });
    EXPECT_EQ(result.error, "");
    EXPECT_EQ(result.arrivals.size(), 5u);
    EXPECT_EQ(result.output_tokens, 5);
  }
}

TEST(HttpTargetTest, TimesAreThoseOfTheArrivals) {
  const RequestResult result = OneResult([](Peer& peer, const std::string&) {
    const std::string events = CompletionEvents(2);
    const size_t cut = events.find("\n\n") + 2;
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    peer.Send(kStreamHead + Chunk(events.substr(0, cut)));
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    peer.Send(Chunk(events.substr(cut)) + kLastChunk);
    return true;
  });
  ASSERT_EQ(result.arrivals.size(), 2u);
  EXPECT_GE(result.arrivals[0] - result.start, 0.04);
  // On a busy machine, the first piece may be read late; the second piece cannot arrive early.
  EXPECT_GE(result.arrivals[1] - result.start, 0.1);
  EXPECT_GT(result.arrivals[1], result.arrivals[0]);
}

TEST(HttpTargetTest, AStreamMayEndWithTheConnection) {
  const RequestResult result = OneResult([](Peer& peer, const std::string&) {
    peer.Send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + CompletionEvents(5));
    return false;
  });
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.output_tokens, 5);
}

TEST(HttpTargetTest, RefusalsHaveStatusCodeAndRetryAfter) {
  const RequestResult result = OneResult([](Peer& peer, const std::string&) {
    const std::string body = R"({"error":{"message":"m","type":"t","code":"queue_full"}})";
    peer.Send("HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
    return true;
  });
  EXPECT_EQ(result.error, "503 queue_full");
  EXPECT_TRUE(result.refused);
  EXPECT_TRUE(result.answered);
  EXPECT_EQ(result.retry_after, 2.0);
  EXPECT_TRUE(result.arrivals.empty());
}

TEST(HttpTargetTest, EveryBadEndHasItsName) {
  const auto stream = [](const std::string& events) {
    return OneResult([&](Peer& peer, const std::string&) {
      peer.SendStream(events);
      return true;
    });
  };
  const std::string events = CompletionEvents(3);
  RequestResult result = stream(events.substr(0, events.find("data: [DONE]")));
  EXPECT_EQ(result.error, "truncated stream");
  EXPECT_FALSE(result.answered);

  result = stream("data: {\"error\":{\"code\":\"internal_error\"}}\n\n");
  EXPECT_EQ(result.error, "stream error internal_error");
  EXPECT_TRUE(result.answered);
  EXPECT_FALSE(result.refused);

  result = stream(events + "data: [DONE]\n\n");
  EXPECT_TRUE(result.duplicate);

  result = OneResult([&](Peer& peer, const std::string&) {
    peer.Send(kStreamHead + Chunk(events));
    return false;
  });
  EXPECT_EQ(result.error, "connection closed");
  EXPECT_TRUE(result.answered);

  result = OneResult([&](Peer& peer, const std::string&) {
    peer.Send(kStreamHead + Chunk(events.substr(0, 40)));
    return false;
  });
  EXPECT_EQ(result.error, "connection closed");
  EXPECT_FALSE(result.answered);

  result = OneResult([](Peer& peer, const std::string&) {
    peer.Reset();
    return false;
  });
  EXPECT_EQ(result.error, "connection reset");
  EXPECT_FALSE(result.answered);

  result = OneResult([](Peer& peer, const std::string&) {
    peer.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}");
    return true;
  });
  EXPECT_EQ(result.error, "200 without an event stream");

  result = OneResult([](Peer& peer, const std::string&) {
    peer.Send("SSH-2.0-no\r\n\r\n");
    return true;
  });
  EXPECT_EQ(result.error, "malformed HTTP response");
  EXPECT_FALSE(result.answered);
}

TEST(HttpTargetTest, TwoAnswersToOneRequestAreSeen) {
  // The second response arrives together with the first one, and after the first one was accepted
  // as complete.
  for (const int delay_ms : {0, 20}) {
    ScriptedServer server([delay_ms](Peer& peer, const std::string&) {
      const std::string answer = kStreamHead + Chunk(CompletionEvents(2)) + kLastChunk;
      if (delay_ms == 0) return peer.Send(answer + answer);
      peer.Send(answer);
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      return peer.Send(answer);
    });
    const auto target = Target(server.url());
    LoadRun run = RunClosed(*target, 1, 1);
    if (delay_ms > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * delay_ms));
      run.answered_twice += target->StrayAnswers();
    }
    EXPECT_EQ(run.answered_twice, 1) << delay_ms;
  }
}

TEST(HttpTargetTest, HangingServersRunIntoTheTimeout) {
  RequestResult result = OneResult(
      [](Peer& peer, const std::string&) {
        peer.WaitForEnd();
        return false;
      },
      0.2);
  EXPECT_EQ(result.error, "timeout before an answer");
  EXPECT_FALSE(result.answered);
  EXPECT_GE(result.end - result.start, 0.2);
  result = OneResult(
      [](Peer& peer, const std::string&) {
        peer.Send(kStreamHead + Chunk(CompletionEvents(5).substr(0, 100)));
        peer.WaitForEnd();
        return false;
      },
      0.2);
  EXPECT_EQ(result.error, "timeout");
  EXPECT_FALSE(result.answered);
}

TEST(HttpTargetTest, CutsOffWhatRunsAtTheEnd) {
  ScriptedServer server([](Peer& peer, const std::string&) {
    peer.Send(kStreamHead);
    peer.WaitForEnd();
    return false;
  });
  const auto target = Target(server.url());
  const LoadRun run =
      RunLoad({.clients = 20, .seconds = 0.05, .drain_seconds = 0.05}, HttpWorkload(), *target);
  EXPECT_EQ(run.cut_off, 20);
  EXPECT_EQ(run.unanswered, 0);
}

TEST(HttpTargetTest, DestroyingATargetClosesItsConnections) {
  std::atomic<int> begun = 0, ended = 0;
  ScriptedServer server([&](Peer& peer, const std::string&) {
    ++begun;
    peer.WaitForEnd();
    ++ended;
    return false;
  });
  constexpr int kRunning = 5;
  {
    const auto target = Target(server.url());
    for (int i = 0; i < kRunning; ++i) target->Start(HttpWorkload().Make(i), target->Now());
    const double deadline = target->Now() + 10.0;
    while (begun < kRunning && target->Now() < deadline) {
      EXPECT_TRUE(target->Wait(target->Now() + 0.02).empty());
    }
    EXPECT_EQ(begun, kRunning);
    EXPECT_EQ(ended, 0);
    // These requests have not been sent yet when the target is destroyed.
    for (int i = 0; i < 5; ++i) target->Start(HttpWorkload().Make(kRunning + i), target->Now());
  }
  for (int i = 0; i < 1000 && ended < begun; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(ended, begun);
}

TEST(HttpTargetTest, ConnectionsThatWereClosedMeanwhileAreReplaced) {
  ScriptedServer server([](Peer& peer, const std::string&) {
    peer.SendStream(CompletionEvents(5));
    return false;  // closes the connection, although the head promised to keep it
  });
  const auto target = Target(server.url());
  for (int i = 0; i < 3; ++i) {
    target->Start(HttpWorkload().Make(i), target->Now());
    const auto results = target->Wait(target->Now() + 10.0);
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].error, "");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

TEST(HttpTargetTest, HundredsOfClients) {
  ScriptedServer server([](Peer& peer, const std::string&) {
    peer.SendStream(CompletionEvents(5));
    return true;
  });
  const auto target = Target(server.url());
  const LoadRun run = RunClosed(*target, 200, 2000);
  const LoadReport report = MakeReport(run);
  EXPECT_EQ(report.completed, 2000);
  EXPECT_EQ(report.wrong_length, 0);
  EXPECT_EQ(report.unanswered + report.answered_twice, 0);
  EXPECT_LE(server.connections(), 202);
}

TEST(HttpTargetTest, NobodyThereIsAnErrorThatSaysSo) {
  int port = 0;
  {
    const ScriptedServer gone([](Peer&, const std::string&) { return false; });
    port = gone.port();
  }
  HttpTargetOptions options;
  options.url = *ParseBaseUrl("http://127.0.0.1:" + std::to_string(port) + "/v1");
  const auto target = HttpTarget::Create(options);
  EXPECT_TRUE(absl::IsUnavailable(target.status()));
  EXPECT_NE(target.status().ToString().find("refused"), std::string::npos) << target.status();

  const ScriptedServer server([](Peer&, const std::string&) { return false; });
  options.url = *ParseBaseUrl("http://127.0.0.1:" + std::to_string(server.port()) + "/v2");
  EXPECT_NE(HttpTarget::Create(options).status().ToString().find("404"), std::string::npos);
  options.served_model = "named";  // with a name, the list of models is not requested
  EXPECT_TRUE(HttpTarget::Create(options).ok());
  options.api_key = "a\r\nb";
  EXPECT_TRUE(absl::IsInvalidArgument(HttpTarget::Create(options).status()));
}

TEST(IdleStreamsTest, HeldStreamsAreReadToTheEndAtTheRelease) {
  std::promise<void> go_on;
  const std::shared_future<void> may_go_on = go_on.get_future().share();
  std::atomic<int> number = 0;
  ScriptedServer server([&](Peer& peer, const std::string&) {
    const int i = number++;
    if (i == 0) {
      peer.Send("HTTP/1.1 503 Full\r\nContent-Length: 0\r\n\r\n");
      return true;
    }
    const std::string events = CompletionEvents(4);
    peer.Send(kStreamHead + Chunk(events.substr(0, 100)));
    if (i == 1) {
      peer.Reset();
      return false;
    }
    may_go_on.wait();
    peer.Send(Chunk(events.substr(100)) + kLastChunk);
    return true;
  });
  const auto target = Target(server.url());
  target->OpenIdleStreams({.count = 20, .output_tokens = 4, .open_seconds = 10.0}, HttpWorkload());
  target->HoldIdleStreams(0.1);
  target->CancelAll();  // called at the end of a load; idle streams must survive it
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    go_on.set_value();
  });
  const IdleStreamReport report = target->ReleaseIdleStreams(10.0);
  release.join();
  EXPECT_EQ(report.wanted, 20);
  EXPECT_GE(report.opened, 18);
  EXPECT_EQ(report.alive, 18);
  EXPECT_EQ(report.completed, 18);
  EXPECT_EQ(report.opened - report.lost, 18);
  for (const auto& [error, count] : report.incomplete) EXPECT_EQ(error, "connection reset");
  EXPECT_EQ(report.not_opened.at("503 error"), 1);
}

TEST(IdleStreamsTest, SlowReadersReadSlowly) {
  const std::string events = CompletionEvents(2000);
  ScriptedServer server([&](Peer& peer, const std::string&) {
    peer.Send(kStreamHead + Chunk(events) + kLastChunk);
    return true;
  });
  const auto target = Target(server.url());
  target->OpenIdleStreams({.count = 2, .read_bytes_per_second = 1000}, HttpWorkload());
  target->HoldIdleStreams(1.5);
  const IdleStreamReport report = target->ReleaseIdleStreams(10.0);
  EXPECT_EQ(report.alive, 2);
  EXPECT_EQ(report.ended_early, 0);
  EXPECT_EQ(report.completed, 2);
}

class OwnServerTest : public testing::HttpTest {
 protected:
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port()) + "/v1"; }
};

TEST_F(OwnServerTest, IdsAndTextsAndCounters) {
  testing::Script script;
  script.endless = true;
  Start(script);
  const auto target = Target(url());
  const LoadReport ids = MakeReport(RunClosed(*target, 8, 100));
  EXPECT_EQ(ids.completed, 100);
  EXPECT_EQ(ids.wrong_length, 0);
  EXPECT_EQ(ids.unanswered + ids.answered_twice, 0);
  const Workload texts = *Workload::Create({.output = {3, 3}, .texts = {"a \"b\" \\ \xc3\xa9"}});
  const LoadRun run = RunLoad({.clients = 1, .requests = 1}, texts, *target);
  EXPECT_EQ(run.samples[0].result.error, "");
  EXPECT_EQ(run.samples[0].result.prompt_tokens, 10);
  const auto counters = target->Counters();
  ASSERT_TRUE(counters.ok()) << counters.status();
  EXPECT_TRUE(counters->steps.has_value());
}

TEST_F(OwnServerTest, RefusalsAreThoseOfTheInterface) {
  testing::Script script;
  script.submit_error = absl::ResourceExhaustedError("full");
  Start(script);
  const auto target = Target(url());
  const LoadReport report = MakeReport(RunClosed(*target, 4, 40));
  EXPECT_EQ(report.refusals.count, 40);
  EXPECT_EQ(report.retry_after.count, 40);
  EXPECT_EQ(report.errors.begin()->first, "503 queue_full");
  EXPECT_EQ(report.unanswered, 0);
}

TEST(BaseUrlTest, TakesWhatClientsTake) {
  const auto url = ParseBaseUrl("http://127.0.0.1:8080/v1/");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->host, "127.0.0.1");
  EXPECT_EQ(url->port, 8080);
  EXPECT_EQ(url->path, "/v1");
  EXPECT_EQ(url->authority, "127.0.0.1:8080");
  EXPECT_EQ(ParseBaseUrl("http://[::1]:81")->host, "::1");
  EXPECT_EQ(ParseBaseUrl("http://[::1]/v1")->port, 80);
  EXPECT_EQ(ParseBaseUrl("http://server")->port, 80);
  EXPECT_EQ(ParseBaseUrl("http://server")->path, "");
  for (const char* bad :
       {"", "server:80", "https://server/v1", "http://", "http:///v1", "http://a b/", "http://a:0/",
        "http://a:99999/", "http://u@a/", "http://a/v1?x=1", "http://a/\r\nX: y", "http://:80/"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseBaseUrl(bad).status())) << bad;
  }
}

}  // namespace
}  // namespace moeserve::server

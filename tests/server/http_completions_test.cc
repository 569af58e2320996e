// Tests POST /v1/completions through a real socket.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;
using Completions = HttpTest;

TEST_F(Completions, AnswerInFull) {
  Start();
  const RawResponse response = Complete(R"({"prompt": "abc", "max_tokens": 10})");
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.headers.at("content-type"), "application/json");
  const Json body = Json::parse(response.body);
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["model"], "tiny");
  EXPECT_TRUE(body["created"].is_number_integer());
  ASSERT_EQ(body["choices"].size(), 1u);
  EXPECT_EQ(body["choices"][0]["text"], "hello");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(body["choices"][0]["logprobs"].is_null());
  EXPECT_EQ(body["usage"], Json({{"prompt_tokens", 3},
                                 {"completion_tokens", 6},
                                 {"total_tokens", 9},
                                 {"prompt_tokens_details", {{"cached_tokens", 0}}}}));
}

TEST_F(Completions, LengthEndsWithLength) {
  Start();
  const Json body = Json::parse(Complete(R"({"prompt": "abc", "max_tokens": 2})").body);
  EXPECT_EQ(body["choices"][0]["text"], "he");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
}

TEST_F(Completions, LogLikelihoodRequestHasOneGeneratedEntry) {
  Start();
  const Json body = Json::parse(
      Complete(R"({"prompt": [[97, 98, 99]], "max_tokens": 1, "logprobs": 1, "echo": true,
                   "temperature": 0, "seed": 1234})")
          .body);
  const Json& choice = body["choices"][0];
  EXPECT_EQ(choice["text"], "abch");
  const Json& logprobs = choice["logprobs"];
  EXPECT_EQ(logprobs["tokens"], Json({"a", "b", "c", "h"}));
  for (const char* key : {"token_logprobs", "top_logprobs", "text_offset"}) {
    EXPECT_EQ(logprobs[key].size(), 4u);
  }
  EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
  EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
  for (int i = 1; i < 4; ++i) {
    const std::string token = logprobs["tokens"][i];
    EXPECT_EQ(logprobs["top_logprobs"][i][token], logprobs["token_logprobs"][i]);
    EXPECT_LE(logprobs["top_logprobs"][i].size(), 2u);
  }
}

TEST_F(Completions, EchoWithoutTokensScoresThePrompt) {
  Start();
  const Json body = Json::parse(
      Complete(R"({"prompt": "abc", "max_tokens": 0, "logprobs": 0, "echo": true})").body);
  EXPECT_EQ(body["choices"][0]["text"], "abc");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"].size(), 3u);
  EXPECT_EQ(body["usage"]["completion_tokens"], 0);
}

TEST_F(Completions, FinalEosHasItsEntry) {
  Start();
  const Json body =
      Json::parse(Complete(R"({"prompt": "a", "max_tokens": 9, "logprobs": 2})").body);
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"], Json({"h", "e", "l", "l", "o", "<eos>"}));
}

TEST_F(Completions, PromptsTimesSamplesInOrder) {
  Start();
  const Json body = Json::parse(Complete(R"({"prompt": ["a", "bb"], "n": 2, "echo": true})").body);
  ASSERT_EQ(body["choices"].size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(body["choices"][i]["index"], i);
    EXPECT_EQ(body["choices"][i]["text"], i < 2 ? "ahello" : "bbhello");
  }
  EXPECT_EQ(body["usage"]["prompt_tokens"], 3);
  EXPECT_EQ(body["usage"]["completion_tokens"], 24);
}

TEST_F(Completions, StreamsJoinToTheUnaryAnswer) {
  Start();
  const std::string fields =
      R"("prompt": ["ab", "c"], "n": 2, "max_tokens": 9, "logprobs": 1, "echo": true)";
  const Json unary = Json::parse(Complete("{" + fields + "}").body);
  const RawResponse response =
      Complete("{" + fields + R"(, "stream": true, "stream_options": {"include_usage": true}})");
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(response.headers.at("content-type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(response.headers.at("cache-control"), "no-cache");
  EXPECT_EQ(response.headers.at("x-accel-buffering"), "no");
  EXPECT_FALSE(response.headers.contains("content-length"));

  const std::vector<Json> events = Events(response.body);
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  const Json& usage = events[events.size() - 2];
  EXPECT_TRUE(usage["choices"].empty());
  EXPECT_EQ(usage["usage"], unary["usage"]);
  std::map<int, std::string> text;
  std::map<int, Json> tokens;
  std::map<int, Json> offsets;
  std::map<int, std::string> reasons;
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json& event = events[i];
    EXPECT_EQ(event["id"], events[0]["id"]);
    EXPECT_EQ(event["created"], events[0]["created"]);
    EXPECT_TRUE(event["usage"].is_null());
    EXPECT_FALSE(event.contains("error"));
    const Json& choice = event["choices"][0];
    const int index = choice["index"];
    EXPECT_FALSE(reasons.contains(index)) << "a chunk after the last of its choice";
    text[index] += choice["text"];
    for (const Json& token : choice["logprobs"]["tokens"]) tokens[index].push_back(token);
    for (const Json& offset : choice["logprobs"]["text_offset"]) offsets[index].push_back(offset);
    if (!choice["finish_reason"].is_null()) reasons[index] = choice["finish_reason"];
  }
  ASSERT_EQ(text.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(text[i], unary["choices"][i]["text"]);
    EXPECT_EQ(tokens[i], unary["choices"][i]["logprobs"]["tokens"]);
    EXPECT_EQ(offsets[i], unary["choices"][i]["logprobs"]["text_offset"]);
    EXPECT_EQ(reasons[i], "stop");
  }
}

// An answer with so many values is written on a work pool.
TEST_F(Completions, LargeAnswersHaveEveryChoice) {
  Script script;
  script.endless = true;
  Start(script);
  const std::string fields = R"("prompt": "x", "max_tokens": 200, "logprobs": 1)";
  const Json small = Json::parse(Complete("{" + fields + "}").body);
  const Json large = Json::parse(Complete("{" + fields + R"(, "n": 100})").body);
  ASSERT_EQ(large["choices"].size(), 100u);
  EXPECT_EQ(small["choices"][0]["logprobs"]["tokens"].size(), 200u);
  for (int i = 0; i < 100; ++i) {
    const Json& choice = large["choices"][i];
    EXPECT_EQ(choice["index"], i);
    for (const char* key : {"text", "logprobs", "finish_reason"}) {
      EXPECT_EQ(choice[key], small["choices"][0][key]);
    }
  }
}

TEST_F(Completions, ContinuousUsageIsInEveryChunk) {
  Start();
  const auto events = Events(Complete(R"({"prompt": "a", "stream": true,
                   "stream_options": {"include_usage": true, "continuous_usage_stats": true}})")
                                 .body);
  EXPECT_EQ(events[0]["usage"]["prompt_tokens"], 1);
  EXPECT_EQ(Events(Complete(R"({"prompt": "a", "stream": true})").body)[0].contains("usage"),
            false);
}

TEST_F(Completions, FailureBeforeTheFirstTokenIsAStatus) {
  Script script;
  script.fail_after = 0;
  Start(script);
  const RawResponse response = Complete(R"({"prompt": "a", "stream": true})");
  EXPECT_EQ(response.status, 500);
  EXPECT_EQ(Error(response)["code"], "internal_error");
  EXPECT_EQ(response.body.find("secrets"), std::string::npos);
}

TEST_F(Completions, FailureInTheStreamIsAnEventWithoutDone) {
  Script script;
  script.fail_after = 2;
  script.delay = absl::Milliseconds(20);
  Start(script);
  const RawResponse response = Complete(R"({"prompt": "a", "stream": true})");
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  const auto events = Events(response.body);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2]["error"]["type"], "server_error");
  EXPECT_EQ(response.body.find("[DONE]"), std::string::npos);
  const RawResponse unary = Complete(R"({"prompt": "a"})");
  EXPECT_EQ(unary.status, 500);
}

TEST_F(Completions, OneFailedChoiceFailsAllAndCancelsTheRest) {
  Script script;
  script.fail_after = 3;
  script.delay = absl::Milliseconds(2);
  Start(script);
  EXPECT_EQ(Complete(R"({"prompt": ["a", "b", "c"]})").status, 500);
  EXPECT_TRUE(engine_->WaitForActive(0));
}

TEST_F(Completions, RefusalsOfTheEngine) {
  Script script;
  script.submit_error = absl::ResourceExhaustedError("the queue is full");
  Start(script);
  RawResponse response = Complete(R"({"prompt": "a"})");
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(Error(response)["code"], "queue_full");
  EXPECT_EQ(Error(response)["type"], "overloaded_error");
  EXPECT_TRUE(response.headers.contains("retry-after"));
  script.submit_error = absl::AlreadyExistsError("running");
  engine_->SetScript(script);
  response = Complete(R"({"prompt": "a", "request_id": "one"})");
  EXPECT_EQ(response.status, 409);
  EXPECT_EQ(response.headers.at("x-should-retry"), "false");
}

TEST_F(Completions, WaitingTooLongInTheQueueHasItsOwnCode) {
  Script script;
  script.fail_after = 0;
  script.run_error = absl::ResourceExhaustedError("waited too long");
  Start(script);
  const RawResponse response = Complete(R"({"prompt": "a"})");
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(Error(response)["code"], "queue_timeout");
}

TEST_F(Completions, ErrorsInTheBody) {
  Start();
  const std::pair<const char*, const char*> cases[] = {
      {"", "invalid_json"},
      {"{", "invalid_json"},
      {"[]", "invalid_json"},
      {R"({"prompt": NaN})", "invalid_json"},
      {R"({"prompt": "a", "temperature": 1e999})", "invalid_json"},
      {R"({"prompt": "a", "prompt": "b"})", "invalid_json"},
      {R"({"prompt": "\ud800"})", "invalid_json"},
      {"{\"prompt\": \"\xff\"}", "invalid_json"},
      {R"({"prompt": "a"} x)", "invalid_json"},
      {R"({"max_tokens": 1})", "missing_field"},
      {R"({"prompt": "a", "max_tokens": 1000})", "context_length_exceeded"},
  };
  for (const auto& [body, code] : cases) {
    const RawResponse response = Complete(body);
    EXPECT_EQ(response.status, 400) << body;
    EXPECT_EQ(Error(response)["code"], code) << body;
    EXPECT_EQ(Error(response)["type"], "invalid_request_error");
  }
  std::string deep(65, '[');
  EXPECT_EQ(Error(Complete("{\"prompt\": " + deep))["code"], "invalid_json");
  const RawResponse unknown = Complete(R"({"prompt": "a", "model": "nope"})");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(Error(unknown)["code"], "model_not_found");
}

TEST_F(Completions, MessagesDoNotQuoteThePrompt) {
  Start();
  const RawResponse response = Complete(R"({"prompt": "my secret text, "temperature": 1})");
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(response.body.find("secret"), std::string::npos) << response.body;
}

TEST_F(Completions, ClientThatLeavesAStreamCancels) {
  Script script;
  script.endless = true;
  script.delay = absl::Milliseconds(5);
  Start(script);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true, "max_tokens": 200})"));
  ASSERT_TRUE(client.ReadUntil("data: "));
  client.Close();
  EXPECT_TRUE(engine_->WaitForCancelled(1));
  EXPECT_TRUE(engine_->WaitForActive(0));
}

TEST_F(Completions, ClientThatLeavesWhileWaitingCancels) {
  Script script;
  script.held = true;
  Start(script);
  for (const bool reset : {false, true}) {
    const int before = engine_->cancelled();
    RawClient client(port());
    client.Send(Post("/v1/completions", R"({"prompt": ["a", "b"]})"));
    ASSERT_TRUE(engine_->WaitForActive(2));
    reset ? client.Reset() : client.Close();
    EXPECT_TRUE(engine_->WaitForCancelled(before + 2));
    EXPECT_TRUE(engine_->WaitForActive(0));
  }
}

// A client may close its sending side after its request, and still read (half-closed TCP).
TEST_F(Completions, HalfClosedClientsGetTheirAnswer) {
  Script script;
  script.held = true;
  Start(script);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "a"})"));
  ASSERT_TRUE(engine_->WaitForActive(1));
  client.CloseSending();
  // The server probes whether the client still reads.
  EXPECT_EQ(client.ReadResponse().status, 102);
  EXPECT_EQ(engine_->cancelled(), 0);
  engine_->Release();
  const RawResponse response = client.ReadResponse();
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(nlohmann::json::parse(response.body)["choices"][0]["text"], "hello");
  EXPECT_TRUE(client.IsClosed());
}

TEST_F(Completions, HalfClosedClientsGetTheirStream) {
  Script script;
  script.endless = true;
  script.delay = absl::Milliseconds(2);
  Start(script);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true, "max_tokens": 50})"));
  ASSERT_TRUE(client.ReadUntil("data: "));
  client.CloseSending();
  const RawResponse response = client.ReadResponse();
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  EXPECT_NE(response.body.find("data: [DONE]"), std::string::npos);
  EXPECT_EQ(engine_->cancelled(), 0);
}

// HTTP/1.0 has no interim responses, so the server cannot find out whether the client still reads.
TEST_F(Completions, HalfClosedClientsOfHttp10AreGone) {
  Script script;
  script.held = true;
  Start(script);
  RawClient client(port());
  const std::string body = R"({"prompt": "a"})";
  client.Send(
      "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body);
  ASSERT_TRUE(engine_->WaitForActive(1));
  client.CloseSending();
  EXPECT_TRUE(engine_->WaitForCancelled(1));
}

// The server does not read further requests while it answers one, but must notice the reset behind
// their bytes.
TEST_F(Completions, ResetBehindPipelinedBytesCancels) {
  Script script;
  script.held = true;
  Start(script);
  RawClient client(port());
  client.Send(Post("/v1/completions", R"({"prompt": "a"})"));
  ASSERT_TRUE(engine_->WaitForActive(1));
  ASSERT_TRUE(client.Send(std::string(200'000, 'x')));
  client.Reset();
  EXPECT_TRUE(engine_->WaitForCancelled(1));
  EXPECT_TRUE(engine_->WaitForActive(0));
}

TEST_F(Completions, SlowReaderIsDropped) {
  Script script;
  script.endless = true;
  script.bytes_per_token = 60'000;
  script.delay = absl::Milliseconds(4);
  ServerSettings settings;
  settings.http.write_stall_timeout = absl::Milliseconds(300);
  settings.http.min_read_bytes_per_second = 1 << 20;
  Start(script, settings);
  RawClient client(port(), 4096);
  client.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true, "max_tokens": 250})"));
  EXPECT_TRUE(engine_->WaitForCancelled(1));
  RawClient other(port());
  other.Send(Get("/version"));
  EXPECT_EQ(other.ReadResponse().status, 200);
}

TEST_F(Completions, SlowButSteadyReaderIsServed) {
  Script script;
  script.endless = true;
  script.bytes_per_token = 2'000;
  ServerSettings settings;
  // Much longer than the pause between two reads, and much shorter than the time until the socket
  // becomes writable again.
  settings.http.write_stall_timeout = absl::Milliseconds(500);
  Start(script, settings);
  RawClient client(port(), 4096);
  client.Send(Post("/v1/completions", R"({"prompt": "a", "stream": true, "max_tokens": 200})"));
  EXPECT_TRUE(
      client.ReadSlowlyUntil("data: [DONE]\n\n\r\n0\r\n\r\n", 2048, std::chrono::milliseconds(25)));
}

// While its receive buffer is full, a client acknowledges nothing: here for 80 ms and longer.
TEST_F(Completions, FullReceiveBufferDoesNotLookLikeAStall) {
  Script script;
  script.endless = true;
  script.bytes_per_token = 2'000;
  ServerSettings settings;
  settings.http.write_stall_timeout = absl::Milliseconds(20);
  settings.http.min_read_bytes_per_second = 20'000;
  Start(script, settings);
  RawClient client(port(), 16'384);
  client.Send(Post("/v1/completions", R"({"prompt": "a", "max_tokens": 250})"));
  ASSERT_TRUE(client.ReadUntil("\r\n\r\n", std::chrono::seconds(10)));
  EXPECT_TRUE(client.ReadSlowlyUntil("}}", 1'000, std::chrono::milliseconds(5)));
}

TEST_F(Completions, AClientThatReadsNothingIsCutOffInTime) {
  Script script;
  script.endless = true;
  script.bytes_per_token = 2'000;
  ServerSettings settings;
  settings.http.write_stall_timeout = absl::Milliseconds(100);
  settings.http.min_read_bytes_per_second = 1 << 20;
  settings.http.max_receive_buffer = 256 << 10;
  Start(script, settings);
  RawClient client(port(), 4096);
  client.Send(Post("/v1/completions", R"({"prompt": "a", "max_tokens": 250})"));
  // At most 100 ms and a quarter of a second after the engine has ended; the rest is for slow
  // machines. The connection is counted until it is closed.
  while (engine_->submitted().empty()) absl::SleepFor(absl::Milliseconds(1));
  for (int i = 0; i < 3000 && context_->metrics().http_connections != 0; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(context_->metrics().http_connections, 0);
}

TEST_F(Completions, ManyStreamsAtOnce) {
  Script script;
  script.reply = "0123456789";
  script.delay = absl::Milliseconds(1);
  Start(script);
  constexpr int kClients = 40;
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] {
      std::string text;
      for (const Json& event :
           Events(Complete(R"({"prompt": "abc", "stream": true, "max_tokens": 32})").body)) {
        if (event.is_object()) text += event["choices"][0]["text"];
      }
      if (text == "0123456789") ++good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, kClients);
}

TEST_F(Completions, RunOutOfTime) {
  Script script;
  script.held = true;
  ServerSettings settings;
  settings.limits.max_request_time = absl::Milliseconds(100);
  Start(script, settings);
  const RawResponse response = Complete(R"({"prompt": "a"})");
  EXPECT_EQ(response.status, 504);
  EXPECT_EQ(Error(response)["code"], "timeout");
}

TEST_F(Completions, SilenceIsFilledWithComments) {
  Script script;
  script.reply = "ab";
  script.delay = absl::Milliseconds(150);
  ServerSettings settings;
  settings.http.stream_comment_interval = absl::Milliseconds(40);
  Start(script, settings);
  const RawResponse response = Complete(R"({"prompt": "a", "stream": true})");
  EXPECT_NE(response.body.find(": keep-alive\n\n"), std::string::npos);
  EXPECT_EQ(Events(response.body).back(), "[DONE]");
}

TEST_F(Completions, TokenIdsOnRequest) {
  Start();
  const Json body = Json::parse(Complete(R"({"prompt": "a", "return_token_ids": true,
      "return_tokens_as_token_ids": true, "logprobs": 1, "max_tokens": 1})")
                                    .body);
  EXPECT_EQ(body["choices"][0]["prompt_token_ids"], Json({97}));
  EXPECT_EQ(body["choices"][0]["token_ids"], Json({104}));
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"], Json({"token_id:104"}));
}

}  // namespace
}  // namespace moeserve::server::testing

// Tests POST /v1/chat/completions and /tokenize with messages through a real socket.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Json = nlohmann::json;

constexpr char kChatTemplate[] =
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system goes first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}";

class Chats : public HttpTest {
 protected:
  Chats() { chat_template_ = kChatTemplate; }

  void StartAllowing(const Script& script = {}) {
    ServerSettings settings;
    settings.allow_request_chat_template = true;
    Start(script, settings);
  }

  // Returns the last prompt that the engine got, with special tokens in angle brackets.
  std::string LastPrompt() const {
    const std::vector<Request> submitted = engine_->submitted();
    return submitted.empty() ? "" : *engine_->tokenizer()->Decode(submitted.back().prompt, false);
  }
};

std::string Body(const std::string& content, const std::string& fields = "") {
  const Json messages = {{{"role", "user"}, {"content", content}}};
  return R"({"messages": )" + messages.dump() + fields + "}";
}

TEST_F(Chats, AnswerInFull) {
  Start();
  const RawResponse response = Chat(Body("hi", R"(, "max_completion_tokens": 10)"));
  EXPECT_EQ(response.status, 200) << response.body;
  const Json body = Json::parse(response.body);
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["model"], "tiny");
  ASSERT_EQ(body["choices"].size(), 1u);
  EXPECT_EQ(body["choices"][0],
            Json({{"index", 0},
                  {"message", {{"role", "assistant"}, {"content", "hello"}, {"refusal", nullptr}}},
                  {"logprobs", nullptr},
                  {"finish_reason", "stop"},
                  {"stop_reason", nullptr}}));
  EXPECT_EQ(LastPrompt(), "[user]hi<eos>[assistant]");
  const int prompt = 8 + 1 + 11;  // tokens of "[user]hi", "<eos>" and "[assistant]"
  EXPECT_EQ(body["usage"], Json({{"prompt_tokens", prompt},
                                 {"completion_tokens", 6},
                                 {"total_tokens", prompt + 6},
                                 {"prompt_tokens_details", {{"cached_tokens", 0}}}}));
}

TEST_F(Chats, SpecialTokensOfMessagesAreText) {
  Start();
  ASSERT_EQ(Chat(Body("<eos>")).status, 200);
  const std::vector<TokenId> prompt = engine_->submitted().back().prompt;
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), kEos), 1);
}

TEST_F(Chats, TheAnswerMayFillTheContext) {
  Script script;
  script.endless = true;
  Start(script);
  const Json body = Json::parse(Chat(Body("hi")).body);
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["total_tokens"], engine_->max_model_len());
}

TEST_F(Chats, LogprobsHaveBytesAndAlternatives) {
  Script script;
  script.reply = "h\xC3\xA9";
  Start(script);
  const Json body = Json::parse(Chat(Body("hi", R"(, "logprobs": true, "top_logprobs": 2)")).body);
  const Json& logprobs = body["choices"][0]["logprobs"];
  EXPECT_TRUE(logprobs["refusal"].is_null());
  ASSERT_EQ(logprobs["content"].size(), 4u);  // including the final <eos>
  EXPECT_EQ(logprobs["content"][0]["token"], "h");
  EXPECT_EQ(logprobs["content"][0]["bytes"], Json({104}));
  EXPECT_EQ(logprobs["content"][0]["logprob"], static_cast<double>(FakeLogprob('h')));
  // the first byte of a two-byte character
  EXPECT_EQ(logprobs["content"][1]["bytes"], Json({0xC3}));
  EXPECT_EQ(logprobs["content"][1]["token"], "\xEF\xBF\xBD");
  EXPECT_EQ(logprobs["content"][3]["token"], "<eos>");
  for (const Json& entry : logprobs["content"]) {
    ASSERT_EQ(entry["top_logprobs"].size(), 2u);
    EXPECT_EQ(entry["top_logprobs"][0]["token"], "A");
    EXPECT_EQ(entry["top_logprobs"][0]["bytes"], Json({65}));
  }
  const Json plain = Json::parse(Chat(Body("hi", R"(, "logprobs": true)")).body);
  EXPECT_EQ(plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"], Json::array());
}

TEST_F(Chats, StreamsJoinToTheUnaryAnswer) {
  Start();
  const std::string fields = R"(, "n": 2, "logprobs": true, "top_logprobs": 1,
                                 "return_token_ids": true)";
  const Json unary = Json::parse(Chat(Body("hi", fields)).body);
  const RawResponse response =
      Chat(Body("hi", fields + R"(, "stream": true, "stream_options": {"include_usage": true})"));
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(response.headers.at("content-type"), "text/event-stream; charset=utf-8");
  const std::vector<Json> events = Events(response.body);
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  const Json& last = events[events.size() - 2];
  EXPECT_EQ(last["choices"], Json::array());
  EXPECT_EQ(last["usage"], unary["usage"]);
  struct Joined {
    int chunks = 0;
    std::string content;
    Json logprobs = Json::array();
    Json ids = Json::array();
    std::string reason;
  };
  std::map<int, Joined> joined;
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json& event = events[i];
    EXPECT_EQ(event["object"], "chat.completion.chunk");
    EXPECT_EQ(event["id"], events[0]["id"]);
    EXPECT_TRUE(event["usage"].is_null());
    EXPECT_FALSE(event.contains("error"));
    const Json& choice = event["choices"][0];
    Joined& to = joined[choice["index"]];
    EXPECT_EQ(to.reason, "") << "a chunk after the last of its choice";
    const Json& delta = choice["delta"];
    if (to.chunks++ == 0) {
      EXPECT_EQ(delta, Json({{"role", "assistant"}, {"content", ""}}));
      EXPECT_EQ(event["prompt_token_ids"], unary["prompt_token_ids"]);
    } else {
      EXPECT_FALSE(delta.contains("role"));
      EXPECT_FALSE(event.contains("prompt_token_ids"));
    }
    to.content += delta.value("content", "");
    if (!choice["logprobs"].is_null()) {
      for (const Json& entry : choice["logprobs"]["content"]) to.logprobs.push_back(entry);
    }
    for (const Json& id : choice.value("token_ids", Json::array())) to.ids.push_back(id);
    if (!choice["finish_reason"].is_null()) {
      to.reason = choice["finish_reason"];
      EXPECT_EQ(delta, Json::object());
    }
  }
  ASSERT_EQ(joined.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    const Json& choice = unary["choices"][i];
    EXPECT_EQ(joined[i].content, choice["message"]["content"]);
    EXPECT_EQ(joined[i].logprobs, choice["logprobs"]["content"]);
    EXPECT_EQ(joined[i].ids, choice["token_ids"]);
    EXPECT_EQ(joined[i].reason, "stop");
  }
}

TEST_F(Chats, PromptLogprobsAreThoseOfThePrompt) {
  Start();
  const Json body = Json::parse(
      Chat(Body("hi", R"(, "prompt_logprobs": 1, "n": 2, "return_token_ids": true)")).body);
  const Json& logprobs = body["prompt_logprobs"];
  const Json& ids = body["prompt_token_ids"];
  ASSERT_EQ(logprobs.size(), ids.size());
  EXPECT_TRUE(logprobs[0].is_null());
  for (size_t i = 1; i < ids.size(); ++i) {
    const TokenId id = ids[i];
    const Json& own = logprobs[i][std::to_string(id)];
    EXPECT_EQ(own["logprob"], static_cast<double>(FakeLogprob(id)));
    EXPECT_EQ(own["rank"], id % 7 + 1);
    EXPECT_EQ(logprobs[i]["65"]["rank"], 1);
    EXPECT_EQ(logprobs[i]["65"]["decoded_token"], "A");
    EXPECT_EQ(logprobs[i].size(), 2u);
  }
  // /v1/completions returns prompt_logprobs per choice; echo keeps its own number of alternatives.
  const Json completion = Json::parse(
      Complete(R"({"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2, "logprobs": 1,
                               "echo": true})")
          .body);
  const Json& choice = completion["choices"][0];
  EXPECT_EQ(choice["prompt_logprobs"].size(), 3u);
  EXPECT_EQ(choice["prompt_logprobs"][1].size(), 3u);
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][1].size(), 2u);
}

TEST_F(Chats, AFailureInTheStreamIsAnEventWithoutDone) {
  Script script;
  script.fail_after = 2;
  script.delay = absl::Milliseconds(20);
  Start(script);
  const RawResponse response = Chat(Body("hi", R"(, "stream": true)"));
  EXPECT_EQ(response.status, 200);
  const std::vector<Json> events = Events(response.body);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back()["error"]["type"], "server_error");
  EXPECT_EQ(response.body.find("[DONE]"), std::string::npos);
  EXPECT_EQ(response.body.find("secrets"), std::string::npos);
}

TEST_F(Chats, RefusalsNameCodeAndField) {
  Start();
  const auto refused = [&](const std::string& body) {
    const RawResponse response = Chat(body);
    EXPECT_EQ(response.status, 400) << response.body;
    const Json error = Error(response);
    return error["code"].get<std::string>() + " " + error.value("param", "");
  };
  EXPECT_EQ(refused(R"({"messages": [{"role": "user", "content": "a"},
                                     {"role": "system", "content": "b"}]})"),
            "invalid_value messages");
  EXPECT_EQ(refused(Body("a", R"(, "chat_template": "x")")), "unsupported_parameter chat_template");
  EXPECT_EQ(refused(Body("a", R"(, "chat_template_kwargs": [1])")),
            "invalid_value chat_template_kwargs");
  EXPECT_EQ(refused(Body(std::string(300, 'x'))), "context_length_exceeded messages");
  EXPECT_EQ(refused(Body(std::string((1 << 20) + 1, 'x'))), "invalid_value messages[0]");
  EXPECT_EQ(refused(Body("a", R"(, "max_tokens": 1000)")), "context_length_exceeded messages");
  std::string many = R"({"messages": [)";
  const Json megabyte = {{"role", "user"}, {"content", std::string(1 << 20, 'x')}};
  for (int i = 0; i < 5; ++i) many += (i == 0 ? "" : ",") + megabyte.dump();
  EXPECT_EQ(refused(many + "]}"), "invalid_value messages");
  EXPECT_NE(context_->MetricsText().find("requests_rejected_total{reason=\"invalid\"} 7"),
            std::string::npos);
  EXPECT_TRUE(engine_->submitted().empty());
}

TEST_F(Chats, WithoutATemplateTheyAreRefused) {
  chat_template_.reset();
  Start();
  const Json error = Error(Chat(Body("a")));
  EXPECT_EQ(error["code"], "invalid_template");
  EXPECT_NE(error["message"].get<std::string>().find("no chat template"), std::string::npos);
  EXPECT_EQ(Complete(R"({"prompt": "a"})").status, 200);
}

TEST_F(Chats, ATemplateThatDoesNotCompileRefusesThem) {
  chat_template_ = "{% for %}";
  Start();
  const Json error = Error(Chat(Body("a")));
  EXPECT_EQ(error["code"], "invalid_template");
  EXPECT_NE(error["message"].get<std::string>().find("line 1"), std::string::npos);
}

TEST_F(Chats, RequestsMayBringTemplatesWhereAllowed) {
  StartAllowing();
  EXPECT_EQ(Chat(Body("a", R"(, "chat_template": "T{{ x }}{{ messages[0].content }}",
                               "chat_template_kwargs": {"x": "<eos>"})"))
                .status,
            200);
  EXPECT_EQ(LastPrompt(), "T<eos>a");
  EXPECT_EQ(engine_->submitted().back().prompt.size(), 7u) << "variables are not trusted";
  EXPECT_EQ(Error(Chat(Body("a", R"(, "chat_template": "{{ x")")))["code"], "invalid_template");
}

TEST_F(Chats, HostileTemplatesEndInAnError) {
  StartAllowing();
  const std::string big = "{% set s = 'x' * 100000 %}";
  const std::vector<std::string> hostile = {
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
      "{% for a in range(100000000) %}{% endfor %}",
      "{{ 'x' * 10000000000 }}",
      "{% set ns = namespace(x='a') %}{% for i in range(99999) %}{% set ns.x = ns.x ~ ns.x %}"
      "{% endfor %}",
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
      "{{ '%1000000000d' % 1 }}",
      "{{ '{:>1000000000}'.format('x') }}",
      "{{ {'a': 1} | tojson(indent=1000000000000) }}",
      big + "{% for i in range(100000) %}{{ s }}{% endfor %}",
      big + "{% for i in range(100000) %}{% set t = s.split('x') %}{% endfor %}",
      "{{ " + std::string(100000, '(') + " }}",
      "{{ messages.__class__.__mro__ }}",
      "{% include '/etc/passwd' %}",
  };
  for (const std::string& source : hostile) {
    Json body = Json::parse(Body("a"));
    body["chat_template"] = source;
    RawClient client(port());
    client.Send(Post("/v1/chat/completions", body.dump()));
    RawResponse response = client.ReadResponse();
    for (int i = 0; i < 5 && response.status == 0; ++i) response = client.ReadResponse();
    EXPECT_EQ(response.status, 400) << source.substr(0, 100) << "\n" << response.body;
    EXPECT_LT(response.body.size(), 600u);
  }
  EXPECT_TRUE(engine_->submitted().empty());
}

TEST_F(Chats, ASlowTemplateHoldsNobodyUp) {
  StartAllowing();
  Json body = Json::parse(Body("a"));
  body["chat_template"] =
      "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}";
  RawClient client(port());
  client.Send(Post("/v1/chat/completions", body.dump()));
  // The server responds to a later request first, because the chat is still being rendered.
  EXPECT_EQ(Exchange(Get("/health")).status, 200);
  EXPECT_FALSE(client.ReadUntil("HTTP", std::chrono::milliseconds(20)));
}

TEST_F(Chats, ContinueTheFinalMessage) {
  Start();
  EXPECT_EQ(Chat(R"({"messages": [{"role": "user", "content": "a"},
                                  {"role": "assistant", "content": "Once"}],
                     "add_generation_prompt": false, "continue_final_message": true})")
                .status,
            200);
  EXPECT_EQ(LastPrompt(), "[user]a<eos>[assistant]Once");
}

TEST_F(Chats, AClientThatLeavesStopsTheGeneration) {
  Script script;
  script.endless = true;
  script.delay = absl::Milliseconds(5);
  Start(script);
  RawClient client(port());
  client.Send(Post("/v1/chat/completions", Body("a", R"(, "stream": true)")));
  ASSERT_TRUE(client.ReadUntil("content"));
  client.Reset();
  EXPECT_TRUE(engine_->WaitForCancelled(1));
}

TEST_F(Chats, TokenizeHasAChatForm) {
  Start();
  const auto tokenize = [&](const std::string& fields) {
    return Json::parse(
        Exchange(Post("/tokenize",
                      R"({"messages": [{"role": "user", "content": "<eos>"}])" + fields + "}"))
            .body);
  };
  const Json answer = tokenize(R"(, "return_token_strs": true)");
  EXPECT_EQ(answer["count"], 6 + 5 + 1 + 11);
  EXPECT_EQ(answer["max_model_len"], 256);
  EXPECT_EQ(answer["token_strs"][11], "<eos>");
  EXPECT_EQ(tokenize(R"(, "add_generation_prompt": false)")["count"], 6 + 5 + 1);
  EXPECT_EQ(
      tokenize(R"(, "add_generation_prompt": false, "continue_final_message": true)")["count"],
      6 + 5);
  engine_->mutable_tokenizer().add_bos = true;
  EXPECT_EQ(tokenize(R"(, "add_special_tokens": true)")["tokens"][0], kBos);
  EXPECT_EQ(tokenize(R"(, "prompt": "x")")["error"]["code"], "invalid_value");
  EXPECT_EQ(tokenize(R"(, "chat_template": "x")")["error"]["code"], "unsupported_parameter");
  // The chat endpoint must encode the same tokens as /tokenize.
  engine_->mutable_tokenizer().add_bos = false;
  ASSERT_EQ(Chat(Body("<eos>")).status, 200);
  EXPECT_EQ(Json(engine_->submitted().back().prompt), answer["tokens"]);
}

}  // namespace
}  // namespace moeserve::server::testing

#include "server/chat/chat_request.h"

#include <gtest/gtest.h>

#include <iterator>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "server/base/api_error.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

RequestRules ChatRules() {
  RequestRules rules;
  rules.served_names = {"tiny"};
  rules.vocab_size = testing::kVocabSize;
  return rules;
}

Result<ChatParams> ParseChatText(const Json& body, bool allow_template = false) {
  return ParseChat(body, body.dump(), ChatRules(), allow_template);
}

// Returns a request with one message and the fields of the JSON object `fields`.
Json WithFields(const std::string& fields) {
  Json body = Json::parse(R"({"messages": [{"role": "user", "content": "hi"}]})");
  body.update(Json::parse(fields));
  return body;
}

Json WithMessages(const std::string& messages) { return {{"messages", Json::parse(messages)}}; }

TEST(ParseChat, TakesTheDefaults) {
  const auto params = ParseChatText(WithFields("{}"));
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->model, "tiny");
  EXPECT_FALSE(params->max_tokens);
  EXPECT_FALSE(params->logprobs);
  EXPECT_FALSE(params->prompt_logprobs);
  EXPECT_FALSE(params->add_special_tokens);
  const Conversation& conversation = params->conversation;
  EXPECT_EQ(conversation.messages.dump(), R"([{"role":"user","content":"hi"}])");
  EXPECT_TRUE(conversation.add_generation_prompt);
  EXPECT_FALSE(conversation.continue_final_message);
  EXPECT_FALSE(conversation.chat_template);
}

TEST(ParseChat, NormalisesMessages) {
  const auto params = ParseChatText(WithMessages(R"([
      {"role": "developer", "content": "a", "name": "n"},
      {"role": "user", "content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]},
      {"role": "assistant", "content": null, "refusal": null, "tool_calls": [], "audio": null},
      {"role": "assistant", "vendor": 1},
      {"role": "system", "content": ""},
      {"role": "user", "content": []}])"));
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->conversation.messages.dump(),
            R"([{"role":"developer","content":"a","name":"n"},)"
            R"({"role":"user","content":"b c"},{"role":"assistant","content":""},)"
            R"({"role":"assistant","content":""},{"role":"system","content":""},)"
            R"({"role":"user","content":""}])");
  EXPECT_EQ(params->ignored_fields, 1);
  RequestRules strict = ChatRules();
  strict.strict_fields = true;
  const auto refused = ParseChat(WithMessages(R"([{"role": "user", "content": "a", "vendor": 1}])"),
                                 "", strict, false);
  EXPECT_EQ(ApiParam(refused.status()), "messages[0].vendor");
}

TEST(ParseChat, ReadsCallsAndTheirResults) {
  const auto params = ParseChatText(WithMessages(R"([
      {"role": "assistant", "content": null, "reasoning": "why", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": {}}"}},
        {"id": "2", "function": {"name": "g", "arguments": ""}}]},
      {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]},
      {"role": "assistant", "content": "said", "tool_calls": [{"function": {"name": "g"}}]}])"));
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->conversation.messages.dump(),
            R"([{"role":"assistant","content":"","reasoning_content":"why","tool_calls":[)"
            R"({"id":"1","type":"function","function":{"name":"f","arguments":{"b":1,"a":{}}}},)"
            R"({"id":"2","type":"function","function":{"name":"g","arguments":{}}}]},)"
            R"({"role":"tool","content":"x","tool_call_id":"1"},)"
            R"({"role":"assistant","content":"said","tool_calls":[)"
            R"({"type":"function","function":{"name":"g","arguments":{}}}]}])");
}

TEST(ParseChat, BoundsTheMemoryOfArguments) {
  // 16 messages of 1 MiB, whose arguments take about 40 times as much memory.
  std::string nested = "{\"a\": [0";
  while (nested.size() + 2 < (1 << 20) - 100) nested += ",0";
  nested += "]}";
  Json body;
  for (int i = 0; i < 16; ++i) {
    body["messages"].push_back(
        {{"role", "assistant"},
         {"tool_calls", {{{"function", {{"name", "f"}, {"arguments", nested}}}}}}});
  }
  const auto params = ParseChatText(body);
  ASSERT_FALSE(params.ok());
  EXPECT_NE(params.status().message().find("MiB of memory"), std::string::npos) << params.status();
}

TEST(ParseChat, TheNewerLimitWins) {
  EXPECT_EQ(ParseChatText(WithFields(R"({"max_tokens": 5})"))->max_tokens, 5);
  EXPECT_EQ(
      ParseChatText(WithFields(R"({"max_tokens": 5, "max_completion_tokens": 7})"))->max_tokens, 7);
  EXPECT_EQ(
      ParseChatText(WithFields(R"({"max_tokens": 5, "max_completion_tokens": null})"))->max_tokens,
      5);
}

TEST(ParseChat, ReadsLogprobs) {
  EXPECT_EQ(ParseChatText(WithFields(R"({"logprobs": true})"))->logprobs, 0);
  EXPECT_EQ(ParseChatText(WithFields(R"({"logprobs": true, "top_logprobs": 4})"))->logprobs, 4);
  EXPECT_FALSE(ParseChatText(WithFields(R"({"logprobs": false})"))->logprobs);
  EXPECT_EQ(ParseChatText(WithFields(R"({"prompt_logprobs": 2})"))->prompt_logprobs, 2);
}

TEST(ParseChat, SharesTheSamplingFields) {
  const auto params = ParseChatText(WithFields(
      R"({"temperature": 0.5, "top_k": 3, "stop": ["x"], "n": 2, "seed": 4, "min_tokens": 2})"));
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->sampling.temperature, 0.5);
  EXPECT_EQ(params->sampling.top_k, 3);
  EXPECT_EQ(params->sampling.stop, std::vector<std::string>{"x"});
  EXPECT_EQ(params->sampling.seed, 4);
  EXPECT_EQ(params->n, 2);
}

TEST(ParseChat, LetsHarmlessFieldsPass) {
  const auto params = ParseChatText(WithFields(
      R"({"tools": [], "tool_choice": "none", "functions": null, "documents": [], "echo": false,
          "modalities": ["text"], "response_format": {"type": "text"}, "user": "u",
          "chat_template": null, "chat_template_kwargs": {}, "unheard_of": 1})"));
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->ignored_fields, 1);
}

struct ChatRefusal {
  const char* body;
  const char* code;
  const char* param;
};

void PrintTo(const ChatRefusal& refusal, std::ostream* out) {
  *out << refusal.code << ' ' << refusal.param;
}

class ParseChatRefuses : public ::testing::TestWithParam<ChatRefusal> {};

TEST_P(ParseChatRefuses, WithCodeAndField) {
  const auto params = ParseChatText(Json::parse(GetParam().body));
  ASSERT_FALSE(params.ok());
  EXPECT_EQ(ApiCode(params.status()), GetParam().code) << params.status();
  EXPECT_EQ(ApiParam(params.status()), GetParam().param) << params.status();
}

#define MESSAGE R"("messages": [{"role": "user", "content": "a"}])"
INSTANTIATE_TEST_SUITE_P(
    Bodies, ParseChatRefuses,
    ::testing::Values(
        ChatRefusal{"[]", "invalid_value", ""}, ChatRefusal{"{}", "missing_field", "messages"},
        ChatRefusal{R"({"messages": null})", "missing_field", "messages"},
        ChatRefusal{R"({"messages": []})", "invalid_value", "messages"},
        ChatRefusal{R"({"messages": "hi"})", "invalid_value", "messages"},
        ChatRefusal{R"({"messages": ["hi"]})", "invalid_value", "messages[0]"},
        ChatRefusal{R"({"messages": [{"content": "a"}]})", "missing_field", "messages[0].role"},
        ChatRefusal{R"({"messages": [{"role": "narrator", "content": "a"}]})", "invalid_value",
                    "messages[0].role"},
        ChatRefusal{R"({"messages": [{"role": 1, "content": "a"}]})", "invalid_value",
                    "messages[0].role"},
        ChatRefusal{R"({"messages": [{"role": "function", "content": "a", "name": "x"}]})",
                    "unsupported_parameter", "messages[0].role"},
        ChatRefusal{R"({"messages": [{"role": "tool", "content": "a"}]})", "missing_field",
                    "messages[0].tool_call_id"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]})",
                    "invalid_value", "messages[0].tool_call_id"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": "a", "reasoning_content": "x"}]})",
                    "invalid_value", "messages[0].reasoning_content"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function":
                   {"name": "f"}}]}]})",
                    "invalid_value", "messages[0].tool_calls"},
        ChatRefusal{R"({"messages": [{"role": "user"}]})", "missing_field", "messages[0].content"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": null}]})", "invalid_value",
                    "messages[0].content"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": 5}]})", "invalid_value",
                    "messages[0].content"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": ["a"]}]})", "invalid_value",
                    "messages[0].content[0]"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})",
                    "invalid_value", "messages[0].content[0]"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                  {"type": "image_url", "image_url": {"url": "data:"}}]}]})",
                    "unsupported_parameter", "messages[0].content[1]"},
        ChatRefusal{R"({"messages": [{"role": "user", "content": "a", "name": 3}]})",
                    "invalid_value", "messages[0].name"},
        ChatRefusal{R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]})",
                    "invalid_value", "messages[0].tool_calls[0]"},
        ChatRefusal{R"({"messages": [{"role": "assistant", "tool_calls": [{"function":
                   {"arguments": "{}"}}]}]})",
                    "missing_field", "messages[0].tool_calls[0].function.name"},
        ChatRefusal{R"({"messages": [{"role": "assistant", "tool_calls": [{"function":
                   {"name": "f", "arguments": "[1]"}}]}]})",
                    "invalid_value", "messages[0].tool_calls[0].function.arguments"},
        ChatRefusal{R"({"messages": [{"role": "assistant", "tool_calls": [{"function":
                   {"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}}]}]})",
                    "invalid_value", "messages[0].tool_calls[0].function.arguments"},
        ChatRefusal{"{" MESSAGE
                    R"(, "add_generation_prompt": true, "continue_final_message": true})",
                    "invalid_value", "continue_final_message"},
        ChatRefusal{"{" MESSAGE R"(, "continue_final_message": true})", "invalid_value",
                    "continue_final_message"},
        ChatRefusal{"{" MESSAGE R"(, "top_logprobs": 2})", "invalid_value", "top_logprobs"},
        ChatRefusal{"{" MESSAGE R"(, "logprobs": 2})", "invalid_value", "logprobs"},
        ChatRefusal{"{" MESSAGE R"(, "logprobs": true, "top_logprobs": 21})", "invalid_value",
                    "top_logprobs"},
        ChatRefusal{"{" MESSAGE R"(, "prompt_logprobs": 1, "stream": true})", "invalid_value",
                    "prompt_logprobs"},
        ChatRefusal{"{" MESSAGE R"(, "max_tokens": 0})", "invalid_value", "max_tokens"},
        ChatRefusal{"{" MESSAGE R"(, "max_completion_tokens": 0})", "invalid_value",
                    "max_completion_tokens"},
        ChatRefusal{"{" MESSAGE R"(, "tools": [{"type": "function"}]})", "missing_field",
                    "tools[0].function"},
        ChatRefusal{"{" MESSAGE R"(, "tools": [{"type": "web_search"}]})", "unsupported_parameter",
                    "tools[0].type"},
        ChatRefusal{"{" MESSAGE R"(, "tool_choice": "required"})", "invalid_value", "tool_choice"},
        ChatRefusal{"{" MESSAGE R"(, "modalities": ["text", "audio"]})", "unsupported_parameter",
                    "modalities"},
        ChatRefusal{"{" MESSAGE R"(, "documents": [{}]})", "unsupported_parameter", "documents"},
        ChatRefusal{"{" MESSAGE R"(, "echo": true})", "unsupported_parameter", "echo"},
        ChatRefusal{"{" MESSAGE R"(, "chat_template": "x"})", "unsupported_parameter",
                    "chat_template"},
        ChatRefusal{"{" MESSAGE R"(, "chat_template_kwargs": [1]})", "invalid_value",
                    "chat_template_kwargs"},
        ChatRefusal{"{" MESSAGE R"(, "stop_sequences": ["x"]})", "unsupported_parameter",
                    "stop_sequences"},
        ChatRefusal{"{" MESSAGE R"(, "model": "other"})", "model_not_found", "model"}));
#undef MESSAGE

TEST(ParseChat, BoundsMessages) {
  Json body;
  for (int i = 0; i < 2048; ++i) body["messages"].push_back({{"role", "user"}, {"content", "a"}});
  EXPECT_TRUE(ParseChatText(body).ok());
  body["messages"].push_back({{"role", "user"}, {"content", "a"}});
  EXPECT_EQ(ApiParam(ParseChatText(body).status()), "messages");

  const auto sized = [&](size_t bytes) {
    return ParseChatText(
        {{"messages", {{{"role", "user"}, {"content", std::string(bytes, 'x')}}}}});
  };
  EXPECT_TRUE(sized(1 << 20).ok());
  EXPECT_EQ(ApiParam(sized((1 << 20) + 1).status()), "messages[0]");
}

TEST(ParseChat, TakesTemplatesWhereTheyAreAllowed) {
  const auto params = ParseChatText(
      WithFields(R"({"chat_template": "T", "chat_template_kwargs": {"a": [1], "b": null}})"), true);
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->conversation.chat_template, "T");
  EXPECT_EQ(params->conversation.template_variables.dump(), R"({"a":[1],"b":null})");
  for (const char* name : {"messages", "tokenize", "add_generation_prompt", "tools", "bos_token",
                           "raise_exception", "namespace", "range", "loop", "strftime_now"}) {
    Json body = WithFields("{}");
    body["chat_template_kwargs"][name] = 1;
    EXPECT_EQ(ApiParam(ParseChatText(body).status()), "chat_template_kwargs") << name;
  }
  Json body = WithFields("{}");
  for (int i = 0; i < 65; ++i) body["chat_template_kwargs"][std::to_string(i)] = 1;
  EXPECT_FALSE(ParseChatText(body, true).ok());
}

Json RandomValue(std::mt19937& random, int depth) {
  static const char* const kKeys[] = {"role", "content", "type", "text", "name", "tool_calls", "x"};
  static const char* const kTexts[] = {"user", "assistant", "system", "text", "", "\xC3\xA9<eos>"};
  switch (random() % (depth > 0 ? 8 : 5)) {
    case 0:
      return nullptr;
    case 1:
      return random() % 2 == 0;
    case 2:
      return static_cast<int64_t>(random()) - (int64_t{1} << 31);
    case 3:
      return static_cast<double>(random()) * 1e-9;
    case 4:
      return kTexts[random() % 6];
    case 5: {
      Json list = Json::array();
      for (unsigned i = random() % 4; i > 0; --i) list.push_back(RandomValue(random, depth - 1));
      return list;
    }
    default: {
      Json object = Json::object();
      for (unsigned i = random() % 4; i > 0; --i) {
        object[kKeys[random() % 7]] = RandomValue(random, depth - 1);
      }
      return object;
    }
  }
}

TEST(ParseChat, RandomBodiesDoNoHarm) {
  static const char* const kFields[] = {"messages",
                                        "max_tokens",
                                        "max_completion_tokens",
                                        "logprobs",
                                        "top_logprobs",
                                        "prompt_logprobs",
                                        "add_generation_prompt",
                                        "continue_final_message",
                                        "add_special_tokens",
                                        "chat_template",
                                        "chat_template_kwargs",
                                        "echo",
                                        "documents",
                                        "modalities",
                                        "tools",
                                        "tool_choice"};
  std::mt19937 random(9);
  int accepted = 0;
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    Json body = WithFields("{}");
    if (random() % 2 == 0) body["messages"].push_back(RandomValue(random, 4));
    for (unsigned i = random() % 3; i > 0; --i) {
      body[kFields[random() % std::size(kFields)]] = RandomValue(random, 4);
    }
    const auto params = ParseChatText(body, random() % 2 == 0);
    ++(params.ok() ? accepted : refused);
    if (!params.ok()) {
      ASSERT_FALSE(ApiCode(params.status()).empty());
      ASSERT_TRUE(absl::IsInvalidArgument(params.status()));
      continue;
    }
    for (const auto& message : params->conversation.messages) {
      ASSERT_TRUE(message["content"].is_string() || message.contains("tool_calls"));
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(PrepareChat, FitsTheContext) {
  const testing::ByteTokenizer tokenizer;
  TokenizerConfig config;
  config.chat_template = "{{ messages[0].content }}";
  const ChatFormat format(config);
  const auto prepare = [&](const std::string& fields) {
    auto params = ParseChatText(WithFields(fields));
    return PrepareChat(*params, format, &tokenizer, RequestLimits(), 10, 0);
  };
  EXPECT_EQ(prepare("{}")->max_tokens, 8);  // all that is left of the context
  EXPECT_EQ(prepare(R"({"max_tokens": 3})")->max_tokens, 3);
  const auto refused = prepare(R"({"max_tokens": 9})");
  EXPECT_EQ(ApiCode(refused.status()), "context_length_exceeded");
  EXPECT_EQ(ApiParam(refused.status()), "messages");
  auto longer = ParseChatText(WithFields(R"({"max_tokens": 9})"));
  EXPECT_EQ(
      PrepareChat(*longer, format, &tokenizer, RequestLimits(), 10, 0, "why").status().message(),
      "the context length of this model is 10 tokens (why); the prompt has 2 and 9 are to be "
      "generated");
  const auto cut = prepare(R"({"truncate_prompt_tokens": 1})");
  EXPECT_EQ(cut->ids, std::vector<TokenId>{'i'});
  auto params = ParseChatText(WithFields("{}"));
  EXPECT_FALSE(PrepareChat(*params, format, nullptr, RequestLimits(), 10, 0).ok());
}

}  // namespace
}  // namespace moeserve::server

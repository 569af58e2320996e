#include "server/tools/generic_tools.h"

#include <gtest/gtest.h>

#include <string>

#include "server/chat/chat_format.h"

namespace moeserve::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

const OrderedJson& Definitions() {
  static const OrderedJson definitions = OrderedJson::parse(
      R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])");
  return definitions;
}

Conversation WithTools(const std::string& messages) {
  Conversation conversation;
  conversation.messages = OrderedJson::parse(messages);
  conversation.tools.choice = ToolChoice::kAuto;
  conversation.tools.callable = {{.name = "f", .parameters = {}}};
  conversation.tools.definitions = Definitions();
  return conversation;
}

std::string RenderedTools(const char* source, const Conversation& conversation) {
  TokenizerConfig config;
  config.chat_template = source;
  const auto prompt = ChatFormat(config).Render(conversation, RequestLimits(), 0);
  return prompt.ok() ? prompt->text : std::string(prompt.status().message());
}

constexpr char kPlain[] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}";
constexpr char kNoSystem[] =
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif "
    "%}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}";

TEST(GenericTools, TemplatesWithoutToolsGetADescription) {
  const std::string text =
      RenderedTools(kPlain, WithTools(R"([{"role": "user", "content": "hi"}])"));
  EXPECT_TRUE(text.starts_with("[system]You can call functions.")) << text;
  EXPECT_NE(text.find(R"({"name":"f","parameters":{"type":"object"}})"), std::string::npos) << text;
  EXPECT_NE(text.find(R"([{"name": "NAME", "arguments": {...}}])"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("\n[user]hi\n")) << text;
  const std::string with_system = RenderedTools(
      kPlain,
      WithTools(R"([{"role": "developer", "content": "S"}, {"role": "user", "content": "hi"}])"));
  EXPECT_TRUE(with_system.starts_with("[system]S\n\nYou can call")) << with_system;
}

TEST(GenericTools, TemplatesThatRefuseSystemMessagesGetItFromTheUser) {
  const std::string text =
      RenderedTools(kNoSystem, WithTools(R"([{"role": "user", "content": "hi"}])"));
  EXPECT_TRUE(text.starts_with("[user]You can call functions.")) << text;
  EXPECT_TRUE(text.ends_with("\n\nhi\n")) << text;
}

TEST(GenericTools, CallsAndResultsAreText) {
  const std::string text = RenderedTools(kPlain, WithTools(R"([
      {"role": "user", "content": "q"},
      {"role": "assistant", "content": null, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": {}}}]},
      {"role": "tool", "content": "r1", "tool_call_id": "1"},
      {"role": "tool", "content": "r2", "tool_call_id": "2", "name": "f"},
      {"role": "user", "content": "go on"}])"));
  EXPECT_TRUE(
      text.ends_with("[user]q\n[assistant][{\"name\": \"f\", \"arguments\": "
                     "{\"b\":1,\"a\":2}}, {\"name\": \"f\", \"arguments\": {}}]\n"
                     "[user]{\"result\":\"r1\"}\n{\"name\":\"f\",\"result\":\"r2\"}\ngo on\n"))
      << text;
}

TEST(GenericTools, TemplatesWithToolsGetTheDefinitions) {
  EXPECT_EQ(
      RenderedTools("{{ tools | tojson }}", WithTools(R"([{"role": "user", "content": "hi"}])")),
      R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])");
  Conversation without = WithTools(R"([{"role": "user", "content": "hi"}])");
  without.tools = ToolSettings();
  EXPECT_EQ(RenderedTools("{{ tools is none }}", without), "True");
}

TEST(ChatFormat, SaysHowTheAnswerIsRead) {
  const auto split = [](const char* source, bool tools) {
    TokenizerConfig config;
    config.chat_template = source;
    Conversation conversation = WithTools(R"([{"role": "user", "content": "<think>"}])");
    if (!tools) conversation.tools = ToolSettings();
    SplitRules rules;
    EXPECT_TRUE(ChatFormat(config).Render(conversation, RequestLimits(), 0, &rules).ok());
    return rules;
  };
  EXPECT_FALSE(split(kPlain, false).needed());
  EXPECT_TRUE(split(kPlain, true).has_tools);
  EXPECT_EQ(split("{{ tools }}<tool_call>", true).syntax->name, "hermes");
  const SplitRules thinks = split("{{ messages[0].content }}</think>", false);
  EXPECT_TRUE(thinks.reasons);
  EXPECT_FALSE(thinks.begins_in_reasoning);
  EXPECT_TRUE(split("{{ messages[0].role }}<think>\n", false).begins_in_reasoning);
  // What the user says is not the template's.
  EXPECT_FALSE(split("{# <think> #}{{ messages[0].content }}", false).begins_in_reasoning);
}

TEST(ChatFormat, TemplatesChooseTheEffort) {
  Conversation conversation = WithTools(R"([{"role": "user", "content": "hi"}])");
  conversation.tools = ToolSettings();
  const auto with = [&](const char* effort, const char* source) {
    conversation.reasoning_effort = effort;
    return RenderedTools(source, conversation);
  };
  EXPECT_EQ(with("low", "{{ reasoning_effort }}"), "low");
  EXPECT_EQ(with("none", "{{ enable_thinking }}"), "False");
  EXPECT_EQ(with("high", "{{ enable_thinking }}"), "True");
  EXPECT_EQ(with("none", "plain"), "plain");
  // The others render the same, and the answer has a warning.
  const auto warning = [&](const char* effort, const char* source) {
    TokenizerConfig config;
    config.chat_template = source;
    conversation.reasoning_effort = effort;
    return ChatFormat(config).EffortWarning(conversation);
  };
  EXPECT_EQ(with("low", "plain"), "plain");
  EXPECT_NE(warning("low", "plain").find("'reasoning_effort'"), std::string::npos);
  EXPECT_NE(warning("none", "</think>").find("'reasoning_effort'"), std::string::npos);
  EXPECT_EQ(warning("none", "plain"), "");
  EXPECT_EQ(warning("low", "{{ reasoning_effort }}"), "");
  EXPECT_EQ(warning("none", "{{ enable_thinking }}</think>"), "");
}

}  // namespace
}  // namespace moeserve::server

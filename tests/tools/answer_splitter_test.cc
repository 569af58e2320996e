#include "server/tools/answer_splitter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/message.h"

namespace moeserve::server {
namespace {

std::string CallId(int call) { return Concat("id", call); }

SplitRules Rules(const CallSyntax& syntax) { return {.syntax = &syntax, .has_tools = true}; }

// Pushes `text` in pieces that end at `cuts`, in ascending order.
AssistantDelta Split(const SplitRules& rules, std::string_view text,
                     const std::vector<size_t>& cuts = {}) {
  const auto splitter = AnswerSplitter::Make(rules, CallId);
  AssistantDelta out;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    out.Append(splitter->Push(text.substr(begin, cut - begin)));
    begin = cut;
  }
  out.Append(splitter->Push(text.substr(begin)));
  out.Append(splitter->Finish());
  EXPECT_EQ(splitter->calls(), static_cast<int>(out.calls.size()));
  return out;
}

std::string Show(const AssistantDelta& delta) {
  std::string text = Concat("<", delta.reasoning, "><", delta.content, ">");
  for (const ToolCallDelta& call : delta.calls) {
    text += Concat(" ", call.index, ":", call.id, ":", call.name, call.arguments);
  }
  return text;
}

// Expects the same result for the whole text, for single bytes and for random pieces.
void ExpectSplit(const SplitRules& rules, const std::string& text, const std::string& expected) {
  EXPECT_EQ(Show(Split(rules, text)), expected) << text;
  std::vector<size_t> all;
  for (size_t i = 1; i < text.size(); ++i) all.push_back(i);
  EXPECT_EQ(Show(Split(rules, text, all)), expected) << text;
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<size_t> cuts;
    for (const size_t i : all) {
      if (random() % 5 == 0) cuts.push_back(i);
    }
    EXPECT_EQ(Show(Split(rules, text, cuts)), expected) << text;
  }
}

std::string CallText(const CallSyntax& syntax, std::string_view name, std::string_view arguments) {
  return Concat(syntax.before_name, name, syntax.before_arguments, arguments,
                syntax.after_arguments);
}

class Syntaxes : public ::testing::TestWithParam<const CallSyntax*> {};

TEST_P(Syntaxes, CallsAreFound) {
  const CallSyntax& syntax = *GetParam();
  const std::string first = R"({"a": "}\"]{", "b": [{}, "\\"]})";
  const std::string call = CallText(syntax, "get_it", first);
  ExpectSplit(Rules(syntax), Concat(syntax.opening, call, syntax.closing),
              "<><> 0:id0:get_it" + first);
  if (syntax.single_call) return;
  const std::string two =
      Concat(syntax.opening, call, syntax.separator, CallText(syntax, "f", "{}"), syntax.closing);
  ExpectSplit(Rules(syntax), two, "<><> 0:id0:get_it" + first + " 1:id1:f{}");
}

TEST_P(Syntaxes, TextAroundCallsIsContent) {
  const CallSyntax& syntax = *GetParam();
  if (syntax.has_channels) return;
  const std::string calls =
      Concat(syntax.opening, CallText(syntax, "f", "{\"x\": 1}"), syntax.closing);
  ExpectSplit(Rules(syntax), "I look.\n\n" + calls, "<><I look.> 0:id0:f{\"x\": 1}");
  ExpectSplit(Rules(syntax), calls + "\nDone.", "<><Done.> 0:id0:f{\"x\": 1}");
  ExpectSplit(Rules(syntax), "a" + calls + "\nb\n" + calls,
              "<><ab> 0:id0:f{\"x\": 1} 1:id1:f{\"x\": 1}");
}

TEST_P(Syntaxes, AnswersThatAreCutOffAreSplit) {
  const CallSyntax& syntax = *GetParam();
  const std::string second =
      syntax.single_call ? "" : Concat(syntax.separator, CallText(syntax, "g", "{}"));
  const std::string text =
      Concat(syntax.opening, CallText(syntax, "f", "{\"x\": 1}"), second, syntax.closing);
  const size_t names = text.find(syntax.before_arguments);
  for (size_t size = 0; size < text.size(); ++size) {
    const AssistantDelta out = Split(Rules(syntax), text.substr(0, size));
    EXPECT_EQ(out.calls.empty(), size < names + syntax.before_arguments.size()) << size;
    if (!out.calls.empty()) {
      EXPECT_EQ(out.content, "") << size;
      EXPECT_TRUE(std::string("{\"x\": 1}").starts_with(out.calls[0].arguments)) << size;
    }
  }
}

TEST_P(Syntaxes, WithoutToolsCallsAreText) {
  const CallSyntax& syntax = *GetParam();
  if (syntax.has_channels) return;
  const std::string text = Concat(syntax.opening, CallText(syntax, "f", "{}"), syntax.closing);
  SplitRules rules = Rules(syntax);
  rules.has_tools = false;
  rules.reasons = true;
  ExpectSplit(rules, text, "<><" + text + ">");
}

TEST_P(Syntaxes, RandomTextLosesNothing) {
  const CallSyntax& syntax = *GetParam();
  const std::vector<std::string_view> pieces = {syntax.opening,
                                                syntax.before_name,
                                                syntax.before_arguments,
                                                "{}",
                                                "{\"a\": \"}\"}",
                                                syntax.after_arguments,
                                                syntax.separator,
                                                syntax.closing,
                                                "name",
                                                " ",
                                                "\n",
                                                "<think>",
                                                "</think>",
                                                "<|end|>",
                                                "<|message|>",
                                                "text"};
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (unsigned i = random() % 12; i > 0; --i) text += pieces[random() % pieces.size()];
    SplitRules rules = Rules(syntax);
    rules.reasons = random() % 2 == 0;
    rules.begins_in_reasoning = rules.reasons && random() % 2 == 0;
    const std::string whole = Show(Split(rules, text));
    std::vector<size_t> cuts;
    for (size_t i = 1; i < text.size(); ++i) {
      if (random() % 3 == 0) cuts.push_back(i);
    }
    ASSERT_EQ(Show(Split(rules, text, cuts)), whole) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Syntaxes, ::testing::ValuesIn([] {
                           std::vector<const CallSyntax*> all;
                           for (const CallSyntax& syntax : CallSyntaxes()) all.push_back(&syntax);
                           return all;
                         }()),
                         [](const auto& info) {
                           std::string name(info.param->name);
                           std::erase_if(name, [](char c) { return c == '-' || c == '.'; });
                           return name;
                         });

TEST(AnswerSplitter, ReasoningIsSplitOff) {
  SplitRules rules{.syntax = FindCallSyntax("hermes"), .reasons = true};
  ExpectSplit(rules, "<think>\nwhy\n\nso\n</think>\n\nyes\n", "<why\n\nso><yes\n>");
  ExpectSplit(rules, "\n<think></think>yes", "<><yes>");
  ExpectSplit(rules, "<think>cut off", "<cut off><>");
  ExpectSplit(rules, "<thin", "<><<thin>");
  ExpectSplit(rules, "yes <think>no</think>", "<><yes <think>no</think>>");
  ExpectSplit(rules, "", "<><>");
  rules.begins_in_reasoning = true;
  ExpectSplit(rules, "why</think>yes", "<why><yes>");
  ExpectSplit(rules, "why</thin", "<why</thin><>");
}

TEST(AnswerSplitter, CallsFollowReasoning) {
  const CallSyntax& syntax = *FindCallSyntax("hermes");
  SplitRules rules = Rules(syntax);
  rules.reasons = true;
  const std::string call = CallText(syntax, "f", "{}");
  ExpectSplit(rules, "<think>not " + call + "</think>\n\n" + call,
              "<not " + call + "><> 0:id0:f{}");
}

TEST(AnswerSplitter, ChannelsAreSplit) {
  const SplitRules rules = Rules(*FindCallSyntax("harmony"));
  ExpectSplit(
      rules,
      "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>"
      "yes<|return|>",
      "<why><yes>");
  ExpectSplit(rules,
              "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary "
              "to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
              "<why><> 0:id0:f{\"a\": 1}");
  // The recipient can also come first, and preambles are content.
  ExpectSplit(rules,
              "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
              "<|channel|>commentary json<|message|>{}",
              "<><I look.> 0:id0:f{}");
  ExpectSplit(rules, "<|channel|>commentary to=browser.open<|message|>x<|end|>", "<x><>");
  ExpectSplit(rules, "plain", "<><plain>");
  SplitRules no_tools = rules;
  no_tools.has_tools = false;
  ExpectSplit(no_tools, "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "<{}><>");
}

TEST(CallSyntax, TemplatesSuggestIt) {
  const auto chosen = [](std::string_view source) { return ChooseCallSyntax(source).name; };
  EXPECT_EQ(chosen("<|im_start|> <tool_call>"), "hermes");
  EXPECT_EQ(chosen("<|start_header_id|> {\"name\": "), "llama3");
  EXPECT_EQ(chosen("[INST] [TOOL_CALLS] ["), "mistral-space");
  EXPECT_EQ(chosen("[INST] [TOOL_CALLS]["), "mistral");
  EXPECT_EQ(chosen("[TOOL_CALLS] name [ARGS]"), "mistral-args");
  EXPECT_EQ(chosen("<｜tool▁calls▁begin｜> ```json"), "deepseek-v3");
  EXPECT_EQ(chosen("<｜tool▁calls▁begin｜>"), "deepseek-v3.1");
  EXPECT_EQ(chosen("<|channel|>"), "harmony");
  EXPECT_EQ(chosen("```json"), "json");
  EXPECT_EQ(chosen(""), "json");
}

TEST(CallSyntax, IdsDifferAndFitTheTemplate) {
  for (const CallSyntax& syntax : CallSyntaxes()) {
    std::vector<std::string> ids;
    for (int choice = 0; choice < 3; ++choice) {
      for (int call = 0; call < 3; ++call) {
        for (const char* response : {"chatcmpl-1", "chatcmpl-2"}) {
          ids.push_back(ToolCallId(syntax, response, choice, call));
          if (syntax.id_length > 0) {
            EXPECT_EQ(ids.back().size(), static_cast<size_t>(syntax.id_length));
          }
        }
      }
    }
    std::sort(ids.begin(), ids.end());
    EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end()) << syntax.name;
  }
}

}  // namespace
}  // namespace moeserve::server

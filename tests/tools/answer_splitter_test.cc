#include "server/tools/answer_splitter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

std::string CallId(int call) { return Concat("id", call); }

SplitRules SplitterRules(const CallSyntax& syntax) {
  return {.syntax = &syntax, .has_tools = true};
}

// Pushes `text` in pieces that end at `cuts`, in ascending order.
AssistantDelta SplitAnswer(const SplitRules& rules, std::string_view text,
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
  EXPECT_EQ(Show(SplitAnswer(rules, text)), expected) << text;
  std::vector<size_t> all;
  for (size_t i = 1; i < text.size(); ++i) all.push_back(i);
  EXPECT_EQ(Show(SplitAnswer(rules, text, all)), expected) << text;
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<size_t> cuts;
    for (const size_t i : all) {
      if (random() % 5 == 0) cuts.push_back(i);
    }
    EXPECT_EQ(Show(SplitAnswer(rules, text, cuts)), expected) << text;
  }
}

// Writes a call as models do. The members of `arguments` must be written without spaces.
std::string CallText(const CallSyntax& syntax, std::string_view name, std::string_view arguments) {
  std::string written(arguments);
  if (!syntax.before_key.empty()) {
    written.clear();
    const auto object = nlohmann::ordered_json::parse(arguments);
    for (const auto& [key, value] : object.items()) {
      written +=
          Concat(syntax.before_key, key, syntax.before_value,
                 value.is_string() ? value.get<std::string>() : value.dump(), syntax.after_value);
    }
  }
  return Concat(syntax.before_name, name, syntax.has_index ? ":0" : "", syntax.before_arguments,
                written, syntax.after_arguments);
}

std::string Id(const CallSyntax& syntax, std::string_view name, int call) {
  return syntax.has_index ? Concat("functions.", name, ":", call) : CallId(call);
}

class Syntaxes : public ::testing::TestWithParam<const CallSyntax*> {};

TEST_P(Syntaxes, CallsAreFound) {
  const CallSyntax& syntax = *GetParam();
  const std::string first = R"({"a": "}\"]{", "b": [{},"\\"]})";
  const std::string call = CallText(syntax, "get_it", first);
  ExpectSplit(SplitterRules(syntax), Concat(syntax.opening, call, syntax.closing),
              Concat("<><> 0:", Id(syntax, "get_it", 0), ":get_it", first));
  if (syntax.single_call) return;
  const std::string two =
      Concat(syntax.opening, call, syntax.separator, CallText(syntax, "f", "{}"), syntax.closing);
  ExpectSplit(SplitterRules(syntax), two,
              Concat("<><> 0:", Id(syntax, "get_it", 0), ":get_it", first,
                     " 1:", Id(syntax, "f", 1), ":f{}"));
}

TEST_P(Syntaxes, TextAroundCallsIsContent) {
  const CallSyntax& syntax = *GetParam();
  if (syntax.has_channels) return;
  const std::string calls =
      Concat(syntax.opening, CallText(syntax, "f", "{\"x\": 1}"), syntax.closing);
  const std::string first = Concat(" 0:", Id(syntax, "f", 0), ":f{\"x\": 1}");
  const std::string second = Concat(" 1:", Id(syntax, "f", 1), ":f{\"x\": 1}");
  ExpectSplit(SplitterRules(syntax), "I look.\n\n" + calls, "<><I look.>" + first);
  ExpectSplit(SplitterRules(syntax), calls + "\nDone.", "<><Done.>" + first);
  ExpectSplit(SplitterRules(syntax), "a" + calls + "\nb\n" + calls, "<><ab>" + first + second);
}

TEST_P(Syntaxes, AnswersThatAreCutOffAreSplit) {
  const CallSyntax& syntax = *GetParam();
  const std::string second =
      syntax.single_call ? "" : Concat(syntax.separator, CallText(syntax, "g", "{}"));
  const std::string text =
      Concat(syntax.opening, CallText(syntax, "f", "{\"x\": 1}"), second, syntax.closing);
  const size_t names =
      text.find(syntax.before_arguments, syntax.opening.size() + syntax.before_name.size());
  for (size_t size = 0; size < text.size(); ++size) {
    const AssistantDelta out = SplitAnswer(SplitterRules(syntax), text.substr(0, size));
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
  SplitRules rules = SplitterRules(syntax);
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
                                                syntax.before_key,
                                                syntax.before_value,
                                                syntax.after_value,
                                                ":7",
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
    SplitRules rules = SplitterRules(syntax);
    rules.reasons = random() % 2 == 0;
    rules.begins_in_reasoning = rules.reasons && random() % 2 == 0;
    const std::string whole = Show(SplitAnswer(rules, text));
    std::vector<size_t> cuts;
    for (size_t i = 1; i < text.size(); ++i) {
      if (random() % 3 == 0) cuts.push_back(i);
    }
    ASSERT_EQ(Show(SplitAnswer(rules, text, cuts)), whole) << text;
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
  SplitRules rules = SplitterRules(syntax);
  rules.reasons = true;
  const std::string call = CallText(syntax, "f", "{}");
  ExpectSplit(rules, "<think>not " + call + "</think>\n\n" + call,
              "<not " + call + "><> 0:id0:f{}");
}

TEST(AnswerSplitter, ChannelsAreSplit) {
  const SplitRules rules = SplitterRules(*FindCallSyntax("harmony"));
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
  EXPECT_EQ(chosen("<|tool_calls_section_begin|>"), "kimi-k2");
  EXPECT_EQ(chosen("'<minimax:tool_call>'"), "minimax-m2");
  EXPECT_EQ(chosen("<tool_call>{name}\n<arg_key>{key}</arg_key></tool_call>"), "glm-4.5");
  EXPECT_EQ(chosen("<tool_call>\n<function=f>\n<parameter=p>"), "qwen3-coder");
}

TEST(CallSyntax, TagsAloneDoNotMakeHermes) {
  const auto chosen = [](std::string_view source) { return ChooseCallSyntax(source).name; };
  EXPECT_EQ(chosen("within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": "
                   "<function-name>, \"arguments\": <args-json-object>}\n</tool_call>"),
            "hermes");
  EXPECT_EQ(chosen("'<tool_call>\\n' + (call | tojson) + '\\n</tool_call>'"), "hermes");
  for (const char* foreign :
       {"<tool_call>name<tool_sep>{}</tool_call>", "<tool_call>\n<invoke>f</invoke></tool_call>",
        "'<tool_call>' + name + '\\n```json\\n' + arguments + '```</tool_call>'",
        "<tool_call>\n<name=f>{}</tool_call>"}) {
    EXPECT_EQ(chosen(foreign), "json") << foreign;
  }
}

SplitRules Offering(const char* syntax, const std::vector<Tool>& tools) {
  SplitRules rules = SplitterRules(*FindCallSyntax(syntax));
  rules.tools = Offered(tools);
  return rules;
}

TEST(AnswerSplitter, ElementsAreReadByTheSchema) {
  const std::vector<Tool> tools = {{.name = "f", .parameters = R"({"type": "object",
      "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "any": {},
      "either": {"type": ["string", "null"]}, "of": {"anyOf": [{"const": "x"}, {"enum": ["y"]}]},
      "mixed": {"oneOf": [{"type": "string"}, {"anyOf": [{"type": "integer"}, {"const": false}]}]},
      "to": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "string"}}})"}};
  for (const char* name : {"qwen3-coder", "glm-4.5", "minimax-m2"}) {
    const SplitRules rules = Offering(name, tools);
    const CallSyntax& syntax = *rules.syntax;
    const auto call = [&](std::string_view key, std::string_view value) {
      return Concat(syntax.opening, syntax.before_name, "f", syntax.before_arguments,
                    syntax.before_key, key, syntax.before_value, value, syntax.after_value,
                    syntax.after_arguments, syntax.closing);
    };
    const auto expect = [&](std::string_view key, std::string_view value, std::string_view json) {
      ExpectSplit(rules, call(key, value), Concat("<><> 0:id0:f{\"", key, "\": ", json, "}"));
    };
    expect("s", "12", "\"12\"");
    expect("s", "Z\u00fcrich \"quoted\"\n\\ </x>", "\"Z\u00fcrich \\\"quoted\\\"\\n\\\\ </x>\"");
    expect("n", "12", "12");
    expect("n", " 12 ", "12");
    expect("n", "twelve", "\"twelve\"");
    expect("any", "{\"a\": [1]}", "{\"a\": [1]}");
    expect("any", "true", "true");
    expect("any", "so", "\"so\"");
    expect("either", "null", "null");
    expect("either", "\"q\"", "\"\\\"q\\\"\"");
    expect("either", "12", "\"12\"");
    expect("mixed", "0.5", "\"0.5\"");
    expect("mixed", "5", "5");
    expect("mixed", "false", "false");
    expect("of", "1", "\"1\"");
    expect("to", "1", "\"1\"");
    expect("unknown", "1", "1");
  }
}

TEST(AnswerSplitter, StringsOfElementsArrivePieceByPiece) {
  const SplitRules rules = Offering(
      "qwen3-coder", {{.name = "f", .parameters = R"({"properties": {"s": {"type": "string"}}})"}});
  const auto splitter = AnswerSplitter::Make(rules, CallId);
  EXPECT_EQ(splitter->Push("<tool_call>\n<function=f>\n<parameter=s>\n").calls.at(0).arguments,
            "{\"s\": \"");
  EXPECT_EQ(splitter->Push("a\"b").calls.at(0).arguments, "a\\\"b");
  EXPECT_TRUE(splitter->Push("\n</param").empty());
  EXPECT_EQ(splitter->Push(" c").calls.at(0).arguments, "\\n</param c");
}

// JSON in an answer is text, unless it is a call of an offered tool.
TEST(AnswerSplitter, OtherJsonIsText) {
  const SplitRules llama = Offering("llama3", {{.name = "find", .parameters = {}}});
  for (const std::string text :
       {R"({"name": "Bob", "age": 3})", R"({"name": "find", "age": 3})", R"({"name": "fin)",
        R"({"name": ")", R"({"name": "find", "parameters")", R"({"name": "fi{"name": "fo)"}) {
    ExpectSplit(llama, text, "<><" + text + ">");
  }
  ExpectSplit(llama, R"(So: {"name": "Bob"} {"name": "find", "parameters": {"a": 1}})",
              R"(<><So: {"name": "Bob"}> 0:id0:find{"a": 1})");
  const SplitRules generic = Offering("json", {{.name = "find", .parameters = {}}});
  ExpectSplit(generic, R"([{"name": "Bob"}])", R"(<><[{"name": "Bob"}]>)");
  ExpectSplit(generic, R"([{"name": "find", "arguments": {}}])", "<><> 0:id0:find{}");
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

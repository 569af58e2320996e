#include "server/chat/history_form.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "server/chat/chat_format.h"
#include "server/chat/chat_request.h"

namespace moeserve::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

HistoryForm FormOf(const std::string& source) {
  const auto compiled = chat::ChatTemplate::Compile(source);
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  return compiled.ok() ? FindHistoryForm(**compiled, OrderedJson::object()) : HistoryForm();
}

// Returns the prompt of a chat whose assistant has called a tool; `assistant` are members of its
// message.
std::string RenderedHistory(const std::string& source, const std::string& assistant,
                            const std::string& tools = "") {
  const std::string text = R"({"messages": [{"role": "user", "content": "q"},
      {"role": "assistant", )" +
                           assistant + R"(},
      {"role": "tool", "tool_call_id": "1", "content": "r"}])" +
                           tools + "}";
  RequestRules rules;
  rules.served_names = {"m"};
  const auto params = ParseChat(nlohmann::json::parse(text), text, rules, false);
  if (!params.ok()) return std::string(params.status().message());
  TokenizerConfig config;
  config.chat_template = source;
  const auto prompt = ChatFormat(config).Render(params->conversation, RequestLimits(), 0);
  return prompt.ok() ? prompt->text : std::string(prompt.status().message());
}

std::string Call(const std::string& arguments) {
  return R"("tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": )" +
         arguments + "}}]";
}

constexpr char kJson[] =
    "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
constexpr char kJoined[] =
    "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}";
constexpr char kPrinted[] =
    "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments }}{% endfor %}{% endfor %}";
constexpr char kItems[] =
    "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}"
    "{% endfor %}";
// Shows calls only behind a content of none, as DeepSeek-V3 does.
constexpr char kNone[] =
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ 'call ' + c.function.arguments }}{% endfor %}{% else %}[{{ m.content }}]{% endif %}"
    "{% endfor %}";

TEST(HistoryForm, ArgumentsAreTextWhereTheTemplateJoinsThem) {
  EXPECT_FALSE(FormOf(kJson).text_arguments);
  EXPECT_FALSE(FormOf(kItems).text_arguments);
  EXPECT_TRUE(FormOf(kJoined).text_arguments);
  EXPECT_TRUE(FormOf(kPrinted).text_arguments) << "an object would be printed as Python prints it";
  EXPECT_FALSE(FormOf("{{ messages[0].content }}").text_arguments);
  // The client's own text, with its spaces; for a client that sends an object, the text of it.
  for (const char* arguments : {R"("{\"b\":  1, \"a\": [2]}")", R"({"b":  1, "a": [2]})"}) {
    const std::string call = Call(arguments);
    EXPECT_EQ(RenderedHistory(kJoined, call), R"([q][]f{"b":  1, "a": [2]}[r])");
    EXPECT_EQ(RenderedHistory(kJson, call), R"([q][]f{"b": 1, "a": [2]}[r])")
        << "the client's order";
    EXPECT_EQ(RenderedHistory(kItems, call), "[q][]<b=1><a=[2]>[r]");
  }
  EXPECT_EQ(RenderedHistory(kJoined, Call(R"("")")), "[q][]f{}[r]");
}

TEST(HistoryForm, ContentIsNoneOnlyWhereCallsNeedIt) {
  EXPECT_FALSE(FormOf(kJson).null_content);
  EXPECT_TRUE(FormOf(kNone).null_content);
  EXPECT_TRUE(FormOf(kNone).text_arguments);
  for (const char* content :
       {"", R"("content": null, )", R"("content": "", )", R"("content": [], )"}) {
    const std::string message = content + Call(R"("{}")");
    EXPECT_EQ(RenderedHistory(kJson, message), "[q][]f{}[r]") << content;
    EXPECT_EQ(RenderedHistory(kNone, message), "[q]call {}[r]") << content;
    EXPECT_EQ(
        RenderedHistory("{% for m in messages %}{{ m.role + m.content | trim }} {% endfor %}",
                        message, R"(, "tools": [{"type": "function", "function": {"name": "f"}}])")
            .find("null"),
        std::string::npos);
  }
}

TEST(HistoryForm, ReasoningHasEveryNameThatTheTemplateReads) {
  for (const std::string name : {"reasoning_content", "reasoning", "thinking"}) {
    const std::string source = "{% for m in messages %}{{ m.content }}{% if m." + name + " %}(" +
                               "{{ m." + name + " }}){% endif %}{% endfor %}";
    for (const std::string sent : {"reasoning_content", "reasoning", "thinking"}) {
      const std::string message = "\"" + sent + R"(": "why", "content": "t", )" + Call(R"("{}")");
      EXPECT_EQ(RenderedHistory(source + "{# tools #}", message), "qt(why)r")
          << name << ' ' << sent;
      // Where the template knows no tools, the calls become text and the reasoning stays.
      const std::string flat = RenderedHistory(
          source, message, R"(, "tools": [{"type": "function", "function": {"name": "f"}}])");
      EXPECT_NE(flat.find("(why)"), std::string::npos) << flat;
    }
  }
  EXPECT_EQ(RenderedHistory("{{ messages[1].thinking is defined }}",
                            R"("reasoning": "", "content": "t")"),
            "False");
}

TEST(HistoryForm, JoinsContentToReasoningWhereTheTemplateRefusesBoth) {
  constexpr char kRefuses[] =
      "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
      "{{ raise_exception('both') }}{% endif %}<{{ m.content or m.thinking }}>"
      "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}"
      "{% endfor %}";
  EXPECT_TRUE(FormOf(kRefuses).joins_reasoning);
  EXPECT_FALSE(FormOf(kJson).joins_reasoning);
  EXPECT_EQ(RenderedHistory(kRefuses, R"("reasoning": "why", "content": "t", )" + Call(R"("{}")")),
            "q<why\n\nt>{}r");
}

TEST(HistoryForm, LongNumbersKeepTheirDigits) {
  const std::string numbers =
      R"({"a": 9223372036854775808, "b": -123456789012345678901234567890, "c": 18446744073709551616})";
  EXPECT_EQ(RenderedHistory(kJson, Call(numbers)), "[q][]f" + numbers + "[r]");
  EXPECT_EQ(RenderedHistory(kItems, Call(numbers)),
            "[q][]<a=9223372036854775808><b=-123456789012345678901234567890>"
            "<c=18446744073709551616>[r]");
  // As the text of a flattened call, too.
  EXPECT_NE(RenderedHistory("{% for m in messages %}{{ m.content }}{% endfor %}", Call(numbers),
                            R"(, "tools": [{"type": "function", "function": {"name": "f"}}])")
                .find("-123456789012345678901234567890"),
            std::string::npos);
}

TEST(HistoryForm, TemplatesOfTheFamilies) {
  const std::string folder = MOESERVE_SOURCE_DIR "/tests/chat/templates/";
  for (const char* name : {"chatml", "deepseek", "llama3", "mistral"}) {
    std::ifstream file(folder + name + ".jinja");
    ASSERT_TRUE(file.good()) << name;
    std::stringstream source;
    source << file.rdbuf();
    const HistoryForm form = FormOf(source.str());
    EXPECT_FALSE(form.null_content) << name;
    EXPECT_FALSE(form.text_arguments) << name;
    EXPECT_FALSE(form.joins_reasoning) << name;
    EXPECT_EQ(form.single_call, std::string_view(name) == "llama3") << name;
  }
}

}  // namespace
}  // namespace moeserve::server

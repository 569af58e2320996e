#include "server/tools/tool_definitions.h"

#include <gtest/gtest.h>

#include <string>

#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/json_text.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

Result<ToolSettings> ParseToolsText(const std::string& text) {
  return ParseTools(Json::parse(text), text);
}

constexpr char kTwo[] = R"("tools": [
    {"type": "function", "function": {"name": "f", "description": "d", "strict": true,
     "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}}}},
    {"type": "function", "function": {"name": "g.x", "parameters": {}}}])";

TEST(ParseTools, ReadsTools) {
  const auto settings = ParseToolsText(std::string("{") + kTwo + "}");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->choice, ToolChoice::kAuto);
  EXPECT_TRUE(settings->parallel);
  ASSERT_EQ(settings->callable.size(), 2u);
  EXPECT_EQ(settings->callable[0].name, "f");
  EXPECT_TRUE(settings->callable[0].strict);
  EXPECT_EQ(Json::parse(settings->callable[0].parameters)["type"], "object");
  EXPECT_EQ(settings->callable[1].parameters, "");
  // The order of members is the client's.
  EXPECT_EQ(settings->definitions[0].dump(),
            R"({"type":"function","function":{"name":"f","description":"d","strict":true,)"
            R"("parameters":{"type":"object","properties":{"z":{"type":"string"},"a":{}}}}})");
}

TEST(ParseTools, ReadsTheChoice) {
  const auto with = [](const std::string& choice) {
    return ParseToolsText(std::string("{\"tool_choice\": ") + choice + ", " + kTwo + "}");
  };
  EXPECT_EQ(with("\"auto\"")->choice, ToolChoice::kAuto);
  EXPECT_EQ(with("\"required\"")->choice, ToolChoice::kRequired);
  EXPECT_EQ(with("null")->choice, ToolChoice::kAuto);
  const auto none = with("\"none\"");
  EXPECT_FALSE(none->enabled());
  EXPECT_TRUE(none->callable.empty());
  EXPECT_TRUE(none->definitions.empty());
  const auto named = with(R"({"type": "function", "function": {"name": "g.x"}})");
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->choice, ToolChoice::kNamed);
  EXPECT_FALSE(named->parallel);
  ASSERT_EQ(named->callable.size(), 1u);
  EXPECT_EQ(named->callable[0].name, "g.x");
  EXPECT_EQ(named->definitions.size(), 2u);
  const auto allowed = with(R"({"type": "allowed_tools", "allowed_tools": {"mode": "required",
      "tools": [{"type": "function", "function": {"name": "f"}}]}})");
  ASSERT_TRUE(allowed.ok()) << allowed.status();
  EXPECT_EQ(allowed->choice, ToolChoice::kRequired);
  EXPECT_EQ(allowed->callable.size(), 1u);
}

TEST(ParseTools, TakesRequestsWithoutTools) {
  for (const char* text :
       {"{}", R"({"tools": null})", R"({"tools": []})", R"({"tools": [], "tool_choice": "auto"})",
        R"({"tool_choice": "none"})", R"({"parallel_tool_calls": false})"}) {
    const auto settings = ParseToolsText(text);
    ASSERT_TRUE(settings.ok()) << text << settings.status();
    EXPECT_FALSE(settings->enabled()) << text;
  }
}

struct ToolRefusal {
  const char* text;
  const char* code;
  const char* param;
};

TEST(ParseTools, RefusesWithTheField) {
#define FUNCTION(members) R"({"tools": [{"type": "function", "function": {)" members "}}]}"
  for (const ToolRefusal& r : {
           ToolRefusal{R"({"tools": {}})", "invalid_value", "tools"},
           ToolRefusal{R"({"tools": ["f"]})", "invalid_value", "tools[0]"},
           ToolRefusal{R"({"tools": [{"function": {"name": "f"}}]})", "invalid_value", "tools[0]"},
           ToolRefusal{R"({"tools": [{"type": "custom"}]})", "unsupported_parameter",
                       "tools[0].type"},
           ToolRefusal{R"({"tools": [{"type": "function"}]})", "missing_field",
                       "tools[0].function"},
           ToolRefusal{R"({"tools": [{"type": "function", "function": 1}]})", "invalid_value",
                       "tools[0].function"},
           ToolRefusal{FUNCTION(""), "missing_field", "tools[0].function.name"},
           ToolRefusal{FUNCTION(R"("name": "a b")"), "invalid_value", "tools[0].function.name"},
           ToolRefusal{FUNCTION(R"("name": "")"), "invalid_value", "tools[0].function.name"},
           ToolRefusal{FUNCTION(R"("name": "f", "description": 1)"), "invalid_value",
                       "tools[0].function.description"},
           ToolRefusal{FUNCTION(R"("name": "f", "parameters": [])"), "invalid_value",
                       "tools[0].function.parameters"},
           ToolRefusal{FUNCTION(R"("name": "f", "strict": 1)"), "invalid_value",
                       "tools[0].function.strict"},
           ToolRefusal{R"({"tools": [{"type": "function", "function": {"name": "f"}},
                       {"type": "function", "function": {"name": "f"}}]})",
                       "invalid_value", "tools[1].function.name"},
           ToolRefusal{R"({"tool_choice": "required"})", "invalid_value", "tool_choice"},
           ToolRefusal{R"({"parallel_tool_calls": 1})", "invalid_value", "parallel_tool_calls"},
       }) {
    const auto settings = ParseToolsText(r.text);
    ASSERT_FALSE(settings.ok()) << r.text;
    EXPECT_EQ(ApiCode(settings.status()), r.code) << settings.status();
    EXPECT_EQ(ApiParam(settings.status()), r.param) << settings.status();
  }
#undef FUNCTION
  for (const char* choice :
       {"1", "\"any\"", "{}", R"({"type": "function"})",
        R"({"type": "function", "function": {"name": "h"}})", R"({"type": "allowed_tools"})",
        R"({"type": "allowed_tools", "allowed_tools": {"tools": []}})",
        R"({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}})"}) {
    const auto settings =
        ParseToolsText(std::string("{\"tool_choice\": ") + choice + ", " + kTwo + "}");
    ASSERT_FALSE(settings.ok()) << choice;
    EXPECT_TRUE(ApiParam(settings.status()).starts_with("tool_choice")) << settings.status();
  }
}

TEST(ParseTools, BoundsTheNumberAndTheSize) {
  const auto many = [](size_t count) {
    Json body;
    for (size_t i = 0; i < count; ++i) {
      body["tools"].push_back(
          {{"type", "function"}, {"function", {{"name", "f" + std::to_string(i)}}}});
    }
    return ParseToolsText(body.dump());
  };
  EXPECT_TRUE(many(kMaxTools).ok());
  EXPECT_EQ(ApiParam(many(kMaxTools + 1).status()), "tools");
  const auto sized = [](size_t bytes) {
    return ParseToolsText(
        Json{{"tools",
              {{{"type", "function"},
                {"function", {{"name", "f"}, {"description", std::string(bytes, 'x')}}}}}}}
            .dump());
  };
  EXPECT_TRUE(sized(kMaxToolBytes - 200).ok());
  EXPECT_EQ(ApiParam(sized(kMaxToolBytes).status()), "tools");
}

TEST(ParseOrdered, KeepsOrderAndDigits) {
  for (const std::string text :
       {R"({"b":1,"a":[-123456789012345678901234567890,18446744073709551615,1.5,null]})",
        R"([9223372036854775808,-9223372036854775808,"1e400",true])", "18446744073709551616",
        "{}"}) {
    EXPECT_EQ(DumpOrdered(ParseOrdered(text)), text);
  }
  const std::string body = R"({"x": {"b": 1, "a": 2}, "y": null})";
  EXPECT_EQ(DumpOrdered(OrderedMember(Json::parse(body), body, "x")), R"({"b":1,"a":2})");
  EXPECT_TRUE(OrderedMember(Json::parse(body), body, "y").is_null());
}

TEST(ElementTexts, FindsTheElementsOfAList) {
  using Texts = std::vector<std::string_view>;
  EXPECT_EQ(ElementTexts(R"( [1, "a,]" ,{"b": [2, 3]} , [[]], null] )"),
            (Texts{"1", R"("a,]")", R"({"b": [2, 3]})", "[[]]", "null"}));
  EXPECT_EQ(ElementTexts("[]"), Texts());
  EXPECT_EQ(ElementTexts("[ ]"), Texts());
  EXPECT_EQ(ElementTexts(R"({"a": [1]})"), Texts());
  EXPECT_EQ(ElementTexts(""), Texts());
}

TEST(MemberText, FindsMembersOfTheOuterObject) {
  const auto text = [](std::string_view json, std::string_view name) {
    return std::string(MemberText(json, name).value_or("none"));
  };
  const std::string json =
      " {\"a\" : {\"tools\": 1} ,\n\"b\":\"x\\\"}\\\\\", \"tools\" : [1, {\"c\": \"]\"}] , \"d\": "
      "2}";
  EXPECT_EQ(text(json, "tools"), "[1, {\"c\": \"]\"}]");
  EXPECT_EQ(text(json, "a"), "{\"tools\": 1}");
  EXPECT_EQ(text(json, "b"), "\"x\\\"}\\\\\"");
  EXPECT_EQ(text(json, "d"), "2");
  EXPECT_EQ(text(json, "c"), "none");
  EXPECT_EQ(text("{}", "a"), "none");
  EXPECT_EQ(text("[]", "a"), "none");
  EXPECT_EQ(text("{\"a\":null}", "a"), "null");
}

}  // namespace
}  // namespace moeserve::server

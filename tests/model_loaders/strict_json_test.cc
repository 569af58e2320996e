#include "base/strict_json.h"

#include <string>

#include "base/error_text.h"
#include "gtest/gtest.h"
#include "tests/model_loaders/support.h"

namespace moeserve {
namespace {

using ::moeserve::testing::Mentions;
using ::moeserve::testing::Message;

TEST(StrictJson, BuildsWhatTheTextSays) {
  const auto json =
      ParseStrictJson(R"( {"a": [1, -2, 2.5, true, null, "x\u00e9"], "b": {"a": {}}} )");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->dump(), R"({"a":[1,-2,2.5,true,null,"xé"],"b":{"a":{}}})");
  EXPECT_TRUE((*json)["a"][0].is_number_unsigned());
  EXPECT_TRUE((*json)["a"][2].is_number_float());
}

TEST(StrictJson, TakesScalarsAtTheTop) {
  EXPECT_EQ(*ParseStrictJson("7"), 7);
  EXPECT_EQ(*ParseStrictJson("\"\""), "");
}

TEST(StrictJson, RefusesRepeatedKeysAndSaysWhere) {
  EXPECT_TRUE(Mentions(ParseStrictJson(R"({"a": 1, "a": 1})").status(),
                       {"\"a\" appears twice", "top-level"}));
  EXPECT_TRUE(Mentions(ParseStrictJson(R"({"x": [{}, {"y": {"k": 1, "k": 2}}]})").status(),
                       {"\"k\" appears twice", "\"x[1].y\""}));
}

TEST(StrictJson, RefusesWhatIsNotJson) {
  for (const char* text : {"",           " ",
                           "{",          "[1,]",
                           "{\"a\":1,}", "{'a':1}",
                           "NaN",        "Infinity",
                           "-Infinity",  "[1] 2",
                           "// x\n1",    "1e999",
                           "-1e999",     "01",
                           "+1",         "\"\\ud800\"",
                           "\"\xff\"",   "\"\xc0\xaf\"",
                           "\"a\nb\"",   "\xEF\xBB\xBF{}",
                           "{\"a\" 1}",  "nul",
                           "\"\\x41\""}) {
    const auto json = ParseStrictJson(text);
    ASSERT_FALSE(json.ok()) << Quoted(text);
    EXPECT_EQ(json.status().code(), absl::StatusCode::kInvalidArgument);
    for (const char c : Message(json.status())) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << Quoted(text);
  }
  EXPECT_FALSE(ParseStrictJson(std::string_view("1\0", 2)).ok());
}

TEST(StrictJson, KeepsLimits) {
  const JsonLimits limits{.max_bytes = 40, .max_depth = 3, .max_values = 6};
  EXPECT_TRUE(ParseStrictJson("[[[1, 2, 3]]]", limits).ok());
  EXPECT_TRUE(Mentions(ParseStrictJson("[[[1, 2, 3, 4]]]", limits).status(), {"6 values"}));
  EXPECT_TRUE(Mentions(ParseStrictJson("[[[[]]]]", limits).status(), {"3 levels"}));
  EXPECT_TRUE(Mentions(ParseStrictJson(std::string(41, ' '), limits).status(), {"40 bytes", "41"}));
  EXPECT_TRUE(Mentions(ParseStrictJson(std::string(1 << 20, '[')).status(), {"64 levels"}));
}

TEST(StrictJson, AsksForMemoryBeforeItIsTaken) {
  for (const char* element : {"{}", "[]", "\"\"", "1", "{\"a\":1}", "[[[1]]]"}) {
    std::string text = "[";
    for (int i = 0; i < 20000; ++i) text += Concat(i > 0 ? "," : "", element);
    text += "]";
    size_t asked = 0;
    const auto count = [&](size_t bytes) {
      asked += bytes;
      return true;
    };
    ASSERT_TRUE(ParseStrictJson(text, {}, count).ok());
    EXPECT_GE(asked, 20000 * sizeof(nlohmann::json)) << element;
    // A limit stops the parser when it is reached, not at the end.
    size_t allowed = asked / 2;
    int refusals = 0;
    const auto refuse = [&](size_t bytes) {
      if (bytes > allowed) return ++refusals, false;
      allowed -= bytes;
      return true;
    };
    EXPECT_TRUE(absl::IsResourceExhausted(ParseStrictJson(text, {}, refuse).status())) << element;
    EXPECT_EQ(refusals, 1) << element;
  }
}

TEST(StrictJson, ClearsNestedValues) {
  auto json = *ParseStrictJson("{\"a\": [1, {\"b\": [[], {}, \"text\"]}], \"c\": {}}");
  ClearJson(json);
  EXPECT_TRUE(json.is_object());
  EXPECT_TRUE(json.empty());
  nlohmann::json scalar = 3;
  ClearJson(scalar);
  EXPECT_EQ(scalar, 3);
}

TEST(StrictJson, IntegersBeyondSixtyFourBitsAreNotIntegers) {
  EXPECT_TRUE(ParseStrictJson("18446744073709551615")->is_number_unsigned());
  EXPECT_TRUE(ParseStrictJson("18446744073709551616")->is_number_float());
  EXPECT_TRUE(ParseStrictJson("-9223372036854775808")->is_number_integer());
}

TEST(StrictJson, ShowsValuesBriefly) {
  const auto shown = [](const char* text) { return ShowJson(*ParseStrictJson(text)); };
  EXPECT_EQ(shown("2.5"), "2.5");
  EXPECT_EQ(shown("null"), "null");
  EXPECT_EQ(shown("[1,2]"), "[1,2]");
  EXPECT_EQ(shown("[1,2,3,4,5,6,7,8,9]"), "a list of 9 values");
  EXPECT_EQ(shown("[[1]]"), "a list of 1 values");
  EXPECT_EQ(shown("{\"a\":1}"), "an object of 1 keys");
  EXPECT_EQ(shown("\"a\\u0007\\\"b\""), "\"a\\x07\\\"b\"");
  EXPECT_LT(ShowJson(nlohmann::json(std::string(5000, 'x'))).size(), 100u);
}

TEST(Problems, OneIsALineSeveralAreAList) {
  Problems problems;
  EXPECT_TRUE(problems.ToStatus("f").ok());
  problems.Add("a: b");
  EXPECT_EQ(Message(problems.ToStatus("f")), "f: a: b");
  for (int i = 0; i < 7; ++i) problems.Add(Concat("p", i));
  EXPECT_EQ(Message(problems.ToStatus("f")),
            "f: 8 problems\n  a: b\n  p0\n  p1\n  p2\n  p3\n  and 3 more");
}

}  // namespace
}  // namespace moeserve

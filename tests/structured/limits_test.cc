// Hostile constraints must be refused or compiled within limits of time and memory, and computing
// masks must stay fast.
#include <pthread.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/corpus.h"
#include "tests/structured/hostile.h"

namespace moeserve::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Returns the CPU time of this thread, which other programs on the machine do not affect.
double UsedSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

int64_t PeakMegabytes() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

struct Refused {
  std::string name;
  ConstraintSpec spec;
  std::string reason;  // part of the error message
};

std::string Number(int i) { return std::to_string(i); }

// Returns a chain of definitions: definition i is make(i + 1), which refers to the next one; the
// last one is `end`.
template <typename Make>
std::string Chain(int count, const Make& make, const std::string& end) {
  return "{\"$ref\":\"#/$defs/0\",\"$defs\":{" +
         List(count,
              [&](int i) {
                return "\"" + Number(i) + "\":" + (i + 1 < count ? make(i + 1) : end);
              }) +
         "}}";
}

std::string Ref(int i) { return "{\"$ref\":\"#/$defs/" + Number(i) + "\"}"; }

// Long because it is a table.
std::vector<Refused> RefusedSpecs() {
  std::vector<Refused> out;
  const auto schema = [&](std::string name, std::string text, std::string reason) {
    out.push_back({std::move(name), Schema(std::move(text)), std::move(reason)});
  };
  schema("deep items", Repeated("{\"items\":", 60) + "{}" + Repeated("}", 60), "nested deeper");
  schema("deep values", "{\"const\":" + Repeated("[", 30000) + Repeated("]", 30000) + "}",
         "nested too deep");
  schema("unclosed", Repeated("{\"items\":", 5000), "nested too deep");
  schema("long", "{\"title\":\"" + Repeated("x", 70000) + "\"}", "bytes, more than");
  schema("a long chain of references", Chain(1500, Ref, "{}"), "refer to each other");
  schema("a long chain of parts",
         Chain(
             1200, [](int i) { return "{\"allOf\":[" + Ref(i) + "]}"; }, "{}"),
         "refer to each other");
  schema("twice the next, anyOf",
         Chain(
             40, [](int i) { return "{\"anyOf\":[" + Ref(i) + "," + Ref(i) + "]}"; }, "{}"),
         "too many");
  schema("twice the next, allOf",
         Chain(
             40, [](int i) { return "{\"allOf\":[" + Ref(i) + "," + Ref(i) + "]}"; },
             "{\"minimum\":1}"),
         "too long to compile");
  schema("a product of alternatives",
         "{\"allOf\":[" +
             List(20,
                  [](int i) {
                    return "{\"anyOf\":[{\"required\":[\"a" + Number(i) +
                           "\"]},{\"required\":[\"b" + Number(i) + "\"]}]}";
                  }) +
             "]}",
         "too many combinations");
  schema("many alternatives of many names",
         "{\"allOf\":[{\"required\":[" + List(8000, [](int i) { return "\"" + Number(i) + "\""; }) +
             "]},{\"anyOf\":[" +
             List(500, [](int i) { return "{\"minItems\":" + Number(i) + "}"; }) + "]}]}",
         "too many combinations");
  schema("overlapping oneOf",
         R"({"oneOf":[{"type":"string","format":"date"},{"type":"string","format":"time"}]})",
         "may match both");
  schema("the opposite of a format", R"({"not":{"format":"date"}})", "\"format\" inside of not");
  schema("the opposite of a list", R"({"type":"array","not":{"const":[1]}})", "inside of not");
  schema("the opposite of names", R"({"not":{"propertyNames":{"maxLength":3}}})",
         "\"propertyNames\" inside of not");
  schema("the opposite of everything", R"({"not":{}})", "no value");
  schema("a circle of opposites", R"({"not":{"$ref":"#"}})", "refers to itself");
  schema("two kinds of contained items",
         R"({"type":"array","allOf":[{"contains":{"const":1}},{"contains":{"const":2}}]})",
         "more than one \"contains\"");
  schema("many contained items",
         R"({"type":"array","contains":{"const":1},"minContains":5,"maxItems":4})", "no value");
  schema("many dependencies",
         "{\"dependentRequired\":{" +
             List(20, [](int i) { return "\"" + Number(i) + "\":[\"x" + Number(i) + "\"]"; }) +
             "}}",
         "too many combinations");
  schema("many patterns of names",
         "{\"type\":\"object\",\"patternProperties\":{" +
             List(20, [](int i) { return "\"" + Number(i) + "\":{}"; }) + "}}",
         "too many patterns");
  schema("patterns of names with large automata",
         "{\"type\":\"object\",\"patternProperties\":{" +
             List(12,
                  [](int i) {
                    return "\"[a-" + std::string(1, static_cast<char>('b' + i)) +
                           "]x{9,90}.{20}y\":{}";
                  }) +
             "}}",
         "");
  schema("a long fraction", R"({"multipleOf":0.12345})", "at most 4 digits");
  schema("different items of any kind", R"({"type":"array","uniqueItems":true,"maxItems":3})",
         "\"uniqueItems\"");
  schema("multiples of many numbers",
         R"({"not":{"allOf":[{"multipleOf":9973},{"multipleOf":9967},{"multipleOf":9949},
             {"multipleOf":9941},{"multipleOf":499},{"multipleOf":9931}]}})",
         "least common multiple");
  schema("the opposite of multiples of large numbers",
         R"({"not":{"allOf":[{"multipleOf":9973},{"multipleOf":9967}]}})", "more automaton states");
  schema("many similar alternatives",
         R"({"$defs":{"x":{"$anchor":"x","type":"object","required":["a"],"properties":{"a":
             {"anyOf":[)" +
             List(200, [](int) { return "{}"; }) + "]}}}},\"oneOf\":[" +
             List(3500, [](int) { return R"({"$ref":"#x"})"; }) + "]}",
         "too long to compile");
  schema("one of many first items",
         "{\"type\":\"array\",\"prefixItems\":[" + List(20000, [](int) { return "{}"; }) +
             "],\"items\":false,\"contains\":{}}",
         "more automaton states");
  schema("the opposite of many first items",
         "{\"not\":{\"prefixItems\":[" + List(20000, [](int) { return "{}"; }) + "]}}",
         "too many alternatives");
  schema("the same names in many parts",
         R"({"type":"object","$defs":{"x":{"$anchor":"x","properties":{)" +
             List(3000, [](int i) { return "\"" + Number(i) + "\":true"; }) + "}}},\"allOf\":[" +
             List(1200, [](int) { return R"({"$ref":"#x"})"; }) + "],\"anyOf\":[" +
             List(30, [](int) { return "{}"; }) + "]}",
         "");
  schema("an anchor that does not exist", R"({"$ref":"#x","$defs":{"a":{"$anchor":"y"}}})",
         "leads nowhere");
  schema("a file", R"({"$ref":"other.json"})", "not loaded from files");
  schema(
      "references in a circle",
      R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"anyOf":[{"$ref":"#/$defs/a"}]}}})",
      "refers to itself");
  schema("a value inside itself",
         R"({"type":"object","properties":{"x":{"$ref":"#"}},"required":["x"]})",
         "requires itself");
  schema("items inside themselves", R"({"type":"array","items":{"$ref":"#"},"minItems":1})",
         "requires itself");
  schema("a reference to nothing", R"({"$ref":"#/$defs/x"})", "leads nowhere");
  schema("a reference elsewhere", R"({"$ref":"http://example.org/x"})", "must point into");
  schema("huge minItems", R"({"type":"array","minItems":1000000000000000})", "shortest text");
  schema("huge minLength", R"({"type":"string","minLength":100000000})", "shortest text");
  schema("huge minLength of a pattern", R"({"type":"string","minLength":1000000,"pattern":"a"})",
         "more automaton states");
  schema("huge maxLength of a pattern", R"({"type":"string","maxLength":1000000,"pattern":"a"})",
         "more automaton states");
  schema(
      "items that double",
      Chain(
          25, [](int i) { return "{\"type\":\"array\",\"minItems\":2,\"items\":" + Ref(i) + "}"; },
          "{}"),
      "shortest text");
  schema("huge minProperties", R"({"type":"object","minProperties":100000})",
         "minProperties asks for more than 1000");
  schema("a long enum", "{\"enum\":[" + List(1001, Number) + "]}", "more than 1000");
  schema("nothing in an enum", R"({"enum":[]})", "non-empty");
  schema("an impossible enum", R"({"type":"string","enum":[1,2]})", "no value");
  schema("false", "false", "no value");
  schema("bounds in the wrong order", R"({"minimum":3,"maximum":2})", "no number");
  schema("no integer between", R"({"type":"integer","minimum":1.2,"maximum":1.8})", "no value");
  schema("no multiple between",
         R"({"type":"integer","multipleOf":1000,"minimum":1001,"maximum":1999})", "no value");
  schema("lengths in the wrong order", R"({"minLength":3,"maxLength":2})", "minimum of characters");
  schema("a required property that is not allowed",
         R"({"type":"object","properties":{"a":false},"required":["a"]})",
         "#/properties/a: no value");
  schema("too few properties allowed",
         R"({"type":"object","required":["a","b"],"maxProperties":1})", "no object");
  schema("a duplicate key", R"({"type":"string","items":{"type":"null","type":"array"}})",
         "\"type\" stands twice");
  schema("NaN", R"({"minimum":NaN})", "not valid JSON");
  schema("infinity", R"({"minimum":1e999})", "not valid JSON");
  schema("a comment", "{/* */}", "not valid JSON");
  schema("more than one", "{}{}", "not valid JSON");
  schema("nothing", "", "not valid JSON");
  schema("a zero byte", std::string("{\0}", 3), "not valid JSON");
  schema("not UTF-8", "{\"title\":\"\xC0\x80\"}", "not UTF-8");
  schema("a number", "1", "object or a boolean");
  for (const char* keyword : {"unevaluatedItems", "unevaluatedProperties", "$dynamicRef"}) {
    schema(keyword, "{\"type\":\"object\",\"" + std::string(keyword) + "\":{}}",
           "\"" + std::string(keyword) + "\" is not supported");
  }
  schema("uniqueItems", R"({"type":"array","uniqueItems":true})", "\"uniqueItems\"");
  schema("more different strings than there are",
         R"({"type":"array","uniqueItems":true,"minItems":5,"items":{"pattern":"^[ab]$",
             "type":"string"}})",
         "no ");
  schema("an unknown word", R"({"tpye":"string"})", "unknown keyword \"tpye\"");
  schema("a pattern with look-ahead", R"({"pattern":"(?=a)b"})", "look-around");

  const auto pattern = [&](std::string name, std::string text, std::string reason) {
    out.push_back({std::move(name), Pattern(std::move(text)), std::move(reason)});
  };
  pattern("repetitions of repetitions", "(?:a{1000}){1000}", "too large");
  pattern("a tower of repetitions", "((((a{99}){99}){99}){99}){99}", "too large");
  pattern("repetitions of nothing", "(((((){1000}){1000}){1000}){1000}){1000}", "too long");
  pattern("optional repetitions", "(?:(?:a?){1000}b?){1000}", "too large");
  pattern("a huge repetition", "a{100001}", "too large a repetition");
  pattern("exponential states", "[\\s\\S]*a[\\s\\S]{30}", "more automaton states");
  pattern("exponential states of words", "(?:a|b)*b(?:a|b){40}", "more automaton states");
  pattern("large sets, repeated", "(?:[^\\u0100-\\u0110\\u1234a-c]{3,900}x?){9,900}", "too large");
  pattern("nested groups", Repeated("(", 100) + Repeated(")", 100), "nested too deep");
  pattern("long", Repeated("a", 1025), "more than 1024");
  pattern("nothing", "[^\\s\\S]", "no text matches");
  pattern("look-behind", "(?<=a)b", "look-around");
  pattern("not UTF-8", "\xFF", "not UTF-8");
  out.push_back({"many repetitions of one item", ContextFree("root ::= \"a\"" + Repeated("*", 10)),
                 "too many repetitions"});
  TextFormat nothing;
  nothing.kind = TextFormat::Kind::kText;
  auto tags = std::make_shared<StructuralTags>();
  for (int i = 0; i < 900; ++i) tags->tags.push_back({"a", nothing, Number(i)});
  tags->free_text = false;
  tags->separator = std::string(60000, '<');
  TextFormat separated_format;
  separated_format.kind = TextFormat::Kind::kTags;
  separated_format.tags = std::move(tags);
  ConstraintSpec separated;
  separated.kind = ConstraintSpec::Kind::kFormat;
  separated.format = std::make_shared<const TextFormat>(std::move(separated_format));
  out.push_back({"a long separator of many tags", std::move(separated), "behind it"});
  out.push_back({"no choices", Choices({}), "empty"});
  out.push_back({"many choices", Choices(std::vector<std::string>(1001, "a")), "more than 1000"});
  out.push_back({"long choices", Choices({std::string(70000, 'a')}), "bytes together"});
  out.push_back({"a choice that is not UTF-8", Choices({"a", "\xC3"}), "entry 1"});
  return out;
}

TEST(LimitsTest, RefusedInTimeAndByName) {
  const int64_t before = PeakMegabytes();
  // A sanitizer slows the compiler down, so that some constraints would reach the limit of time
  // before the limit that the test names.
  ConstraintLimits limits;
  if (kSanitized) limits.compile_time *= 10;
  for (const Refused& refused : RefusedSpecs()) {
    const double start = UsedSeconds();
    const auto compiled = CompileConstraint(refused.spec, SmallVocabulary(), limits);
    const double seconds = UsedSeconds() - start;
    ASSERT_FALSE(compiled.ok()) << refused.name;
    EXPECT_EQ(compiled.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(compiled.status().message().find(refused.reason), std::string::npos)
        << refused.name << ": " << compiled.status();
    EXPECT_LT(compiled.status().message().size(), 500u) << refused.name;
    // The limit applies to elapsed time; CPU time is less than that.
    EXPECT_LT(seconds, kSanitized ? 22 : 2.2) << refused.name;
  }
  if (!kSanitized) {
    EXPECT_LT(PeakMegabytes() - before, 400);
  }
}

// Groups, repetitions and rules, each nested as deep as possible, on a small stack.
TEST(LimitsTest, NestedRulesFitTheStack) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer needs a larger stack";
  std::string grammar;
  for (int rule = 0; rule < 60; ++rule) {
    std::string body = "r" + Number(rule + 1);
    for (int i = 0; i < 60; ++i) body = "(" + body + ")" + Repeated("*", 8);
    grammar += "r" + Number(rule) + " ::= " + body + "\n";
  }
  grammar = "root ::= r0\n" + grammar + "r60 ::= \"a\"\n";
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 3 << 20), 0);
  pthread_t thread;
  const auto run = [](void* text) -> void* {
    const ConstraintSpec spec = ContextFree(*static_cast<std::string*>(text));
    static_cast<void>(CompileConstraint(spec, SmallVocabulary(), ConstraintLimits{}).ok());
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &grammar), 0);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
  pthread_attr_destroy(&attributes);
}

// Alternatives whose trees would take gigabytes together.
TEST(LimitsTest, ManyLargeAlternatives) {
  const int64_t before = PeakMegabytes();
  const std::string grammar =
      "root ::= b" + Repeated("|b", 20000) + "\nb ::= \"" + std::string(1900, 'a') + "\"";
  const double start = UsedSeconds();
  static_cast<void>(
      CompileConstraint(ContextFree(grammar), SmallVocabulary(), ConstraintLimits{}).ok());
  EXPECT_LT(UsedSeconds() - start, kSanitized ? 8 : 2.2);
  if (!kSanitized) {
    EXPECT_LT(PeakMegabytes() - before, 400);
  }
}

TEST(LimitsTest, CompiledInTimeAndMemory) {
  const int64_t before = PeakMegabytes();
  for (const NamedSpec& hard : HardSpecs()) {
    const double start = UsedSeconds();
    ASSERT_NE(Compile(hard.spec), nullptr) << hard.name;
    EXPECT_LT(UsedSeconds() - start, kSanitized ? 4 : 2.2) << hard.name;
  }
  if (!kSanitized) {
    EXPECT_LT(PeakMegabytes() - before, 400);
  }
}

// Measures masks along a completion that keeps as many ways to parse it open as possible.
TEST(LimitsTest, HardMasksAreQuick) {
  Random random(31);
  // Vocabularies large enough to make unbounded walks visible. In the second one, many tokens begin
  // a string.
  std::vector<std::string> quoted = MakeTokens(300, AllBytes());
  for (int i = 0; i < 30000; ++i) {
    quoted.push_back("\"");
    for (int n = 0; n < 4; ++n) quoted.back() += static_cast<char>('a' + random.Below(26));
  }
  const auto large = MakeVocabulary(MakeTokens(60000, AllBytes()));
  const auto large_quoted = MakeVocabulary(quoted);
  for (const NamedSpec& hard : HardSpecs()) {
    const bool strings = hard.name.starts_with("strings");
    const auto& vocabulary = strings ? *large_quoted : *large;
    const auto constraint = Compile(hard.spec, strings ? large_quoted : large);
    double slowest = 0;
    for (const std::string start :
         {"", "{\"", "{\"a\": {\"b\":", "[[[[[[", "\"abc", "{\"a\":{\"a\":{"}) {
      const auto state = constraint->NewState();
      for (const char c : start) {
        if (!state->Accept(2 + static_cast<uint8_t>(c))) break;
      }
      for (int i = 0; i < 8; ++i) {
        const double before = UsedSeconds();
        const auto mask = MaskOf(state.get(), vocabulary, 40 - i);
        slowest = std::max(slowest, UsedSeconds() - before);
        const auto allowed = TokensOf(mask);
        ASSERT_FALSE(allowed.empty()) << hard.name;
        const double between = UsedSeconds();
        // Beside the limit of the mask, few tokens are left, so that endings are searched for.
        const TokenId id = allowed[random.Below(static_cast<int>(allowed.size()))];
        if (!state->AcceptInTime(id, 4 + 3 * i)) {
          ASSERT_TRUE(state->Accept(id));
        }
        slowest = std::max(slowest, UsedSeconds() - between);
        if (state->complete() && !state->can_continue()) break;
      }
    }
    // Most masks take a few milliseconds. The slowest one takes 0.08 to 0.12 seconds, depending on
    // the processor.
    EXPECT_LT(slowest, kSanitized ? 1.0 : 0.25) << hard.name;
  }
}

// Whatever a constraint is, one call does a bounded amount of work, and a text that takes much for
// every token ends.
TEST(LimitsTest, WorkOfEveryTokenIsBounded) {
  const auto vocabulary = MakeVocabulary(MakeTokens(20000, AllBytes()));
  int ended = 0;
  for (const NamedSpec& spec : ManyReadings()) {
    SCOPED_TRACE(spec.name);
    const ConstraintLimits limits{.compile_time = std::chrono::minutes(2)};
    const auto compiled = CompileConstraint(spec.spec, vocabulary, limits);
    if (!compiled.ok()) {
      EXPECT_NE(compiled.status().message().find("too much work"), std::string::npos)
          << compiled.status();
      ++ended;
      continue;
    }
    const auto state = (*compiled)->NewState();
    Random random(33);
    double slowest = 0;
    for (int i = 0; i < 250 && !state->overworked(); ++i) {
      const int64_t work = state->work();
      const double before = UsedSeconds();
      const auto mask = MaskOf(state.get(), *vocabulary);
      slowest = std::max(slowest, UsedSeconds() - before);
      EXPECT_LT(state->work() - work, 2500000);
      if (state->overworked()) break;
      const auto allowed = TokensOf(mask);
      ASSERT_FALSE(allowed.empty());
      const TokenId id = allowed[random.Below(static_cast<int>(allowed.size()))];
      if (id == kEos) break;
      const auto clone = state->Clone();
      const bool accepted = state->Accept(id);
      ASSERT_TRUE(accepted || state->overworked());
      // Copies do the same work.
      ASSERT_EQ(clone->Accept(id), accepted);
      ASSERT_EQ(clone->work(), state->work());
    }
    if (state->overworked()) {
      ++ended;
      EXPECT_FALSE(state->Accept(2 + 'a'));
      EXPECT_TRUE(state->Clone()->overworked());
    }
    EXPECT_LT(slowest, kSanitized ? 2.0 : 0.2);
  }
  EXPECT_GT(ended, 0);
}

// The heaviest of the ordinary constraints never ends.
TEST(LimitsTest, OrdinaryTextsDoNotEnd) {
  const auto vocabulary = MakeVocabulary(MakeTokens(20000, AllBytes()));
  for (const ConstraintSpec& spec : Corpus()) {
    const auto constraint = Compile(spec, vocabulary);
    const auto state = constraint->NewState();
    Random random(34);
    for (int i = 0; i < 60; ++i) {
      const auto allowed = TokensOf(MaskOf(state.get(), *vocabulary));
      ASSERT_FALSE(state->overworked()) << spec.text;
      const TokenId id = allowed[random.Below(static_cast<int>(allowed.size()))];
      if (id == kEos) break;
      ASSERT_TRUE(state->Accept(id)) << spec.text;
    }
  }
}

TEST(LimitsTest, DeepAnswersEnd) {
  const auto constraint = Compile(Schema("{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}"));
  const auto state = constraint->NewState();
  int depth = 0;
  while (state->Accept(2 + '[')) ++depth;
  EXPECT_GT(depth, 60);
  EXPECT_LT(depth, 200);
  for (int i = 0; i < depth; ++i) ASSERT_TRUE(state->Accept(2 + ']'));
  EXPECT_TRUE(state->complete());
}

TEST(LimitsTest, KeysAreOnlyUsedOnce) {
  for (const bool named : {false, true}) {
    std::string schema = "{\"type\":\"object\"}";
    if (named) {
      schema = "{\"type\":\"object\",\"properties\":{" +
               List(200, [](int i) { return "\"" + Number(i) + "\":{}"; }) +
               "},\"additionalProperties\":false}";
    }
    const auto constraint = Compile(Schema(schema));
    const auto state = constraint->NewState();
    const auto feed = [](ConstraintState* to, const std::string& text) {
      return std::all_of(text.begin(), text.end(),
                         [&](char c) { return to->Accept(2 + static_cast<uint8_t>(c)); });
    };
    ASSERT_TRUE(feed(state.get(), "{\"0\":0"));
    for (int i = 1; i < 200; ++i) {
      ASSERT_TRUE(feed(state.get(), ",\"" + Number(i) + "\":0")) << i;
      ASSERT_FALSE(feed(state->Clone().get(), ",\"" + Number(i / 2) + "\":"));
    }
    // In a closed object, all properties have been used.
    EXPECT_EQ(feed(state->Clone().get(), ","), !named);
    EXPECT_TRUE(feed(state.get(), "}"));
  }
}

}  // namespace
}  // namespace moeserve::testing

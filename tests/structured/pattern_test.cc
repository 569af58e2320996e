// Patterns compared with a matcher that walks the syntax tree.
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/support.h"

namespace moeserve::testing {
namespace {

// A random pattern. `ends` returns all positions at which a match that starts at a given position
// can end.
struct Tree {
  std::string text;
  std::function<std::set<size_t>(const std::u32string&, size_t)> ends;
};

std::string Utf8(char32_t c) {
  std::string out;
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  if (c < 0x800) {
    out += static_cast<char>(0xC0 | (c >> 6));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
  }
  return out + static_cast<char>(0x80 | (c & 0x3F));
}

constexpr char32_t kAlphabet[] = {U'a', U'b', U'"', U'\n', U'é', U'😀'};

Tree SetTree(std::string text, std::function<bool(char32_t)> has) {
  return {std::move(text), [has](const std::u32string& s, size_t at) -> std::set<size_t> {
            if (at < s.size() && has(s[at])) return {at + 1};
            return {};
          }};
}

Tree RandomTree(Random* random, int depth, bool anchors) {
  const int kind = random->Below(depth > 0 ? 11 : 6);
  switch (kind) {
    case 0:
    case 1: {
      const char32_t c = kAlphabet[random->Below(std::size(kAlphabet))];
      return SetTree(Utf8(c), [c](char32_t x) { return x == c; });
    }
    case 2:
      return SetTree("[^b\\u00e9-\\u00ff]",
                     [](char32_t x) { return x != 'b' && !(x >= 0xE9 && x <= 0xFF); });
    case 3:
      return SetTree("[a\\n😀-😂]",
                     [](char32_t x) { return x == 'a' || x == '\n' || (x >= U'😀' && x <= U'😂'); });
    case 4:
      return SetTree(".", [](char32_t x) { return x != '\n'; });
    case 5:
      if (anchors) {
        const bool start = random->Below(2) == 0;
        return {start ? "^" : "$", [start](const std::u32string& s, size_t at) -> std::set<size_t> {
                  if (at == (start ? 0 : s.size())) return {at};
                  return {};
                }};
      }
      return SetTree("\\W", [](char32_t x) { return x != 'a' && x != 'b'; });
    case 6:
    case 7: {
      const Tree a = RandomTree(random, depth - 1, anchors);
      const Tree b = RandomTree(random, depth - 1, anchors);
      return {a.text + b.text, [a, b](const std::u32string& s, size_t at) {
                std::set<size_t> out;
                for (const size_t middle : a.ends(s, at)) out.merge(b.ends(s, middle));
                return out;
              }};
    }
    case 8: {
      const Tree a = RandomTree(random, depth - 1, anchors);
      const Tree b = RandomTree(random, depth - 1, anchors);
      return {"(" + a.text + "|" + b.text + ")", [a, b](const std::u32string& s, size_t at) {
                std::set<size_t> out = a.ends(s, at);
                out.merge(b.ends(s, at));
                return out;
              }};
    }
    default: {
      const Tree a = RandomTree(random, depth - 1, anchors);
      const int min = random->Below(3);
      const int max = random->Below(3) == 0 ? -1 : min + random->Below(3);
      std::string mark =
          "{" + std::to_string(min) + "," + (max < 0 ? "" : std::to_string(max)) + "}";
      if (min == 0 && max < 0 && random->Below(2)) mark = "*";
      if (min == 1 && max < 0) mark = "+?";
      return {"(?:" + a.text + ")" + mark, [a, min, max](const std::u32string& s, size_t at) {
                std::set<size_t> reached = {at};
                std::set<size_t> out;
                // After as many rounds as there are characters, nothing new can be reached.
                const int rounds = max < 0 ? min + static_cast<int>(s.size()) + 1 : max;
                for (int i = 0; i <= rounds; ++i) {
                  if (i >= min) out.insert(reached.begin(), reached.end());
                  std::set<size_t> next;
                  for (const size_t p : reached) next.merge(a.ends(s, p));
                  reached = std::move(next);
                }
                return out;
              }};
    }
  }
}

std::vector<std::u32string> Strings(size_t longest) {
  std::vector<std::u32string> out = {U""};
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].size() == longest) break;
    for (const char32_t c : kAlphabet) out.push_back(out[i] + c);
  }
  return out;
}

std::string Utf8(const std::u32string& text) {
  std::string out;
  for (const char32_t c : text) out += Utf8(c);
  return out;
}

TEST(PatternTest, MatchesWhatTheTreeMatches) {
  Random random(7);
  const std::vector<std::u32string> strings = Strings(4);
  int matches = 0;
  for (int round = 0; round < 200; ++round) {
    const Tree tree = RandomTree(&random, 4, /*anchors=*/false);
    const auto compiled = CompileConstraint(Pattern(tree.text), SmallVocabulary());
    ASSERT_TRUE(compiled.ok()) << tree.text << compiled.status();
    for (const std::u32string& s : strings) {
      const bool expected = tree.ends(s, 0).contains(s.size());
      matches += expected;
      ASSERT_EQ(Accepts(**compiled, Utf8(s)), expected) << tree.text << " on " << Utf8(s);
    }
  }
  EXPECT_GT(matches, 1000);
}

TEST(PatternTest, JsonStringsAreSearchedDecoded) {
  Random random(8);
  const std::vector<std::u32string> strings = Strings(3);
  int matches = 0;
  int refused = 0;
  for (int round = 0; round < 200; ++round) {
    const Tree tree = RandomTree(&random, 4, /*anchors=*/true);
    const nlohmann::json schema = {{"type", "string"}, {"pattern", tree.text}};
    const auto compiled = CompileConstraint(Schema(schema.dump()), SmallVocabulary());
    bool any = false;
    for (const std::u32string& s : strings) {
      bool expected = false;
      for (size_t at = 0; at <= s.size(); ++at) expected |= !tree.ends(s, at).empty();
      any |= expected;
      matches += expected;
      if (!compiled.ok()) continue;
      const nlohmann::json value = Utf8(s);
      ASSERT_EQ(Accepts(**compiled, value.dump()), expected) << tree.text << " on " << value;
      ASSERT_EQ(Accepts(**compiled, value.dump(-1, ' ', /*ensure_ascii=*/true)), expected)
          << tree.text << " on " << value;
    }
    // Anchors in the middle can make a pattern that matches nothing.
    refused += !compiled.ok();
    ASSERT_TRUE(compiled.ok() || !any) << tree.text << compiled.status();
  }
  EXPECT_GT(matches, 1000);
  EXPECT_LT(refused, 100);
}

TEST(PatternTest, Escapes) {
  const auto constraint = Compile(Pattern(R"(\d\w\s\x41\u{1F600}\uD83D\ude00\t[\]\-\\b-d]\/\.)"));
  EXPECT_TRUE(Accepts(*constraint, "7_ A😀😀\t]/."));
  EXPECT_TRUE(Accepts(*constraint, "7_\tA😀😀\tc/."));
  EXPECT_FALSE(Accepts(*constraint, "7_ A😀😀\ta/."));
  EXPECT_FALSE(Accepts(*constraint, "7- A😀😀\t]/."));
  EXPECT_TRUE(Accepts(*Compile(Pattern("(?i)ab[c-e]{2}")), "AbCe"));
  EXPECT_FALSE(Accepts(*Compile(Pattern("ab[c-e]{2}")), "AbCe"));
  EXPECT_TRUE(Accepts(*Compile(Pattern("^a$")), "a"));
  EXPECT_TRUE(Accepts(*Compile(Pattern("a{,x}{")), "a{,x}{"));
  EXPECT_TRUE(Accepts(*Compile(Pattern("")), ""));
}

TEST(PatternTest, CaseIsIgnoredInClasses) {
  const auto compiled = Compile(Pattern("(?i)[a-c\\s]+"));
  EXPECT_TRUE(Accepts(*compiled, "aB C"));
  EXPECT_TRUE(Accepts(*compiled, "a\u00a0C"));
  EXPECT_FALSE(Accepts(*compiled, "d"));
}

TEST(PatternTest, OnlyWellFormedUtf8) {
  const auto constraint = Compile(Pattern("[\\s\\S]*"));
  EXPECT_TRUE(Accepts(*constraint, "\xF4\x8F\xBF\xBF"));
  for (const std::string_view bad : {"\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                                     "\x80", "\xC3", "\xF5\x80\x80\x80"}) {
    EXPECT_FALSE(Accepts(*constraint, bad));
  }
}

TEST(PatternTest, RefusesByName) {
  const std::pair<std::string, std::string> kCases[] = {{"(a)\\1", "back-references"},
                                                        {"a(?=b)", "look-around"},
                                                        {"(?<!a)b", "look-around"},
                                                        {"\\bword", "word boundaries"},
                                                        {"\\p{L}", "properties"},
                                                        {"a(", "missing ')'"},
                                                        {"a)", "unmatched ')'"},
                                                        {"[a", "missing ']'"},
                                                        {"[b-a]", "wrong range"},
                                                        {"*a", "repetition of nothing"},
                                                        {"a**", "repetition"},
                                                        {"a++", "possessive"},
                                                        {"a{3,2}", "out of order"},
                                                        {"(?<n>a)\\k<n>", "back-references"},
                                                        {"a{,3}", "lower bound"},
                                                        {"\\", "backslash at the end"},
                                                        {"[]", "empty class"},
                                                        {"\\q", "unknown escape"},
                                                        {"^*", "anchor"},
                                                        {"a$b", "no text matches"},
                                                        {"(?P=n)", "back-references"},
                                                        {"\\ud800", "\\u needs"},
                                                        {"(?>a)", "kind of group"},
                                                        {"(?i)[^\u00e9]", "non-ASCII"},
                                                        {"(?i)[\u00e9\\s]", "non-ASCII"}};
  for (const auto& [pattern, reason] : kCases) {
    const auto compiled = CompileConstraint(Pattern(pattern), SmallVocabulary());
    ASSERT_FALSE(compiled.ok()) << pattern;
    EXPECT_EQ(compiled.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(compiled.status().message().find(reason), std::string::npos)
        << pattern << ": " << compiled.status();
  }
}

}  // namespace
}  // namespace moeserve::testing

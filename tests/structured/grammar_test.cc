// Context-free grammars.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/hostile.h"
#include "tests/structured/support.h"

namespace moeserve::testing {
namespace {

struct GrammarExample {
  std::string grammar;
  std::vector<std::string> texts;
  std::vector<std::string> others;
};

void CheckGrammar(const GrammarExample& example) {
  SCOPED_TRACE(example.grammar);
  const auto compiled = Compile(ContextFree(example.grammar));
  ASSERT_NE(compiled, nullptr);
  for (const std::string& text : example.texts) EXPECT_TRUE(Accepts(*compiled, text)) << text;
  for (const std::string& text : example.others) EXPECT_FALSE(Accepts(*compiled, text)) << text;
}

constexpr char kArithmetic[] = R"g(
# Sums and products.
root   ::= sum
sum    ::= product (("+" | "-") product)*
product::= value ("*" value)*
value  ::= [0-9]+ | "(" sum ")" |
           "-" value
)g";

TEST(GrammarTest, Ebnf) {
  CheckGrammar({kArithmetic,
                {"1", "1+2*3", "((1))-2", "--1", "(1+(2*(3)))*4"},
                {"", "1+", "(1", "1)", "a", "1 + 2", "()"}});
  CheckGrammar(
      {"root ::= \"a\" root \"b\" | \"\"", {"", "ab", "aaabbb"}, {"a", "ba", "aab", "abab"}});
  CheckGrammar({"root ::= item{2,3} end?\nitem ::= [^a-c\\n] | 'b'\nend ::= \"\\x41\\u00e9\\\"\"",
                {"db", "ddd", "bbA\xC3\xA9\"", "ééé"},
                {"d", "dddd", "da", "d\n", "dAA\""}});
  CheckGrammar({"root ::= . .{0,1} \"\"", {"é", "\n\n"}, {"", "abc"}});
  CheckGrammar({"root ::= (a | b){2} \"x\"{3} [-a]{1,}\na ::= \"1\"\nb ::= a a",
                {"11xxx-", "1111xxxa-", "111xxxa"},
                {"1xxx-", "11111xxx-", "11xxx", "11xx-"}});
}

TEST(GrammarTest, Lark) {
  CheckGrammar({R"g(
start: pair ("," pair)*   // pairs
# "=" stands between a name and a value
?pair.2: NAME "=" value -> pair
value: SIGNED_NUMBER | ESCAPED_STRING | "[" [value ("," value)*] "]"
NAME: /[a-z_]\w*/i
%import common.SIGNED_NUMBER
%import common (ESCAPED_STRING, WS)
%ignore WS
)g",
                {"a=1", "A_1 = \"x\\\"\" , b=[1, [ ] ,-2.5e3]\n", " a=1"},
                {"", "a=", "1=1", "a=[1,]", "a=\"x", "a=1,"}});
  CheckGrammar({"start: \"yes\"i \"a\"..\"c\" X~2 X~1..2\nX: \"x\"",
                {"YeSbxxx", "yesaxxxx"},
                {"yesdxxx", "yesaxx", "yesaxxxxx"}});
  CheckGrammar(
      {"start: sum\nsum: product | sum \"+\" product\nproduct: INT | product \"*\" INT\n"
       "%import common.INT",
       {"1", "1+2", "1*2+3*4+5"},
       {"+", "1+", "1**2", ""}});
}

TEST(GrammarTest, ImportsMeanTheCommonTerminals) {
  CheckGrammar({"start: NUMBER\nINT: \"x\"\nFLOAT: \"y\"\n%import common.NUMBER",
                {"5", "1.5", ".5e3", "1e-2"},
                {"x", "y", "", "."}});
  CheckGrammar(
      {"start: FOO INT\nINT: \"x\"\n%import common.INT -> FOO", {"5x"}, {"xx", "55", "5"}});
  CheckGrammar(
      {"start: A B C\n%import common (SIGNED_FLOAT, SIGNED_NUMBER)\n"
       "A: SIGNED_FLOAT\nB: \" \"\nC: SIGNED_NUMBER",
       {"+1.5 -3", "-.5 4"},
       {"1 3", "1.5 +-3"}});
  // Surrogates are no characters.
  CheckGrammar({"start: \"\\u0000\"..\"\\uffff\"", {"a", "é"}, {"\xED\xA0\x80", ""}});
}

TEST(GrammarTest, TheFirstRuleTellsTheNotation) {
  CheckGrammar({"start: NAME \"::=\" NAME\nNAME: /[a-z]+/", {"a::=b"}, {"a=b"}});
  CheckGrammar({"# a grammar\nroot\n  ::= \"a:\" b\nb ::= \"c\"", {"a:c"}, {"ac"}});
}

TEST(GrammarTest, RulesThatBeginWithThemselves) {
  CheckGrammar(
      {"root ::= root \"a\" | \"b\" | \"c\" root", {"b", "baa", "cba", "cbaa"}, {"", "a", "ab"}});
  CheckGrammar(
      {"root ::= root root \"x\" | \"y\"", {"y", "yyx", "yyxyx", "yyyxx"}, {"x", "yy", "yyxx"}});
  CheckGrammar(
      {"root ::= (\"y\" | root \"x\")*", {"", "y", "yy", "x", "yxx", "yxyxy"}, {"z", "yz"}});
}

TEST(GrammarTest, Refusals) {
  for (const auto& [grammar, message] : std::vector<std::pair<std::string, std::string>>{
           {"", "start"},
           {"root ::= ", ""},
           {"root ::= missing", "\"missing\" is not defined"},
           {"item ::= \"a\"", "\"root\""},
           {"root ::= \"a\"\nroot ::= \"b\"", "twice"},
           {"root ::= \"a", "ends inside"},
           {"root ::= (\"a\"", "')'"},
           {"root ::= \"a\")", "')'"},
           {"root ::= [b-a]", "order"},
           {"root ::= \"a\"{3,2}", "below"},
           {"root ::= \"a\"{999999}", "above"},
           {"root ::= \"\\ud800\"", "character"},
           {"root ::= (=\"a\") \"b\"", "look-ahead"},
           {"root ::= TagDispatch((\"a\", b))", "not supported"},
           {"root ::= a\na ::= b \"x\" | \"y\"\nb ::= a | \"z\"", "begins with itself"},
           {"root ::= e root \"x\" | \"y\"\ne ::= \"\" | \"z\"", "begins with itself"},
           {"root ::= \"a\" root", "no text"},
           {"start: a{b}\n", "templates"},
           {"start: /a(?=b)/\n", "grammar: line 1"},
           {"start: /^a/\n", "^ and $"},
           {"start: /a/x\n", "flags"},
           {"start: X\n%import python.X", "common"},
           {"start: X\n%import common.X", "common"},
           {"start: X\n%declare X", "%declare"},
           {"root ::= \"\xFF\"", "UTF-8"},
           {"root ::= " + Repeated("(", 1000), "nested"},
           {"root ::= \"a\"" + Repeated("?", 1000), "repetitions"}}) {
    const auto compiled = CompileConstraint(ContextFree(grammar), SmallVocabulary());
    if (message.empty()) {
      EXPECT_TRUE(compiled.ok()) << compiled.status();
      continue;
    }
    ASSERT_FALSE(compiled.ok()) << grammar;
    EXPECT_NE(std::string(compiled.status().message()).find(message), std::string::npos)
        << compiled.status() << "\n"
        << grammar;
  }
}

// Grammars of random rules, with a recogniser that tries all ways.
struct RandomGrammar {
  // rules[i]: alternatives, each a list of symbols: 'a' to 'c', or the index of a rule.
  std::vector<std::vector<std::vector<int>>> rules;

  std::string Text() const {
    std::string out;
    for (size_t i = 0; i < rules.size(); ++i) {
      out += (i == 0 ? "root" : "r" + std::to_string(i)) + " ::= ";
      for (size_t j = 0; j < rules[i].size(); ++j) {
        if (j > 0) out += " | ";
        if (rules[i][j].empty()) out += "\"\"";
        for (const int symbol : rules[i][j]) {
          if (symbol >= 'a') {
            out += "\"" + std::string(1, static_cast<char>(symbol)) + "\" ";
          } else {
            out += symbol == 0 ? "root " : "r" + std::to_string(symbol) + " ";
          }
        }
      }
      out += "\n";
    }
    return out;
  }

  // Returns for each rule and each pair of positions whether the rule matches the text between
  // them; repeats until nothing changes.
  bool Matches(std::string_view text) const {
    const size_t n = text.size() + 1;
    std::vector<uint8_t> table(rules.size() * n * n, 0);
    const auto at = [&](size_t rule, size_t begin, size_t end) -> uint8_t& {
      return table[(rule * n + begin) * n + end];
    };
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t rule = 0; rule < rules.size(); ++rule) {
        for (const auto& symbols : rules[rule]) {
          for (size_t begin = 0; begin < n; ++begin) {
            std::vector<uint8_t> ends(n, 0);
            ends[begin] = 1;
            for (const int symbol : symbols) {
              std::vector<uint8_t> next(n, 0);
              for (size_t p = begin; p < n; ++p) {
                if (!ends[p]) continue;
                if (symbol >= 'a') {
                  if (p + 1 < n && text[p] == symbol) next[p + 1] = 1;
                } else {
                  for (size_t q = p; q < n; ++q) next[q] |= at(symbol, p, q);
                }
              }
              ends = next;
            }
            for (size_t end = begin; end < n; ++end) {
              if (!ends[end] || at(rule, begin, end)) continue;
              at(rule, begin, end) = 1;
              changed = true;
            }
          }
        }
      }
    }
    return at(0, 0, n - 1);
  }
};

TEST(GrammarTest, AllShortTexts) {
  Random random(81);
  int compiled_grammars = 0;
  int accepted = 0;
  for (int round = 0; round < 600; ++round) {
    RandomGrammar grammar;
    grammar.rules.resize(1 + random.Below(4));
    for (auto& rule : grammar.rules) {
      rule.resize(1 + random.Below(3));
      for (auto& symbols : rule) {
        symbols.resize(random.Below(4));
        for (int& symbol : symbols) {
          symbol = random.Below(2) == 0 ? 'a' + random.Below(2)
                                        : random.Below(static_cast<int>(grammar.rules.size()));
        }
      }
    }
    const auto compiled = CompileConstraint(ContextFree(grammar.Text()), SmallVocabulary());
    if (!compiled.ok()) {
      const std::string message(compiled.status().message());
      ASSERT_TRUE(message.find("begins with itself") != std::string::npos ||
                  message.find("no text") != std::string::npos)
          << message << "\n"
          << grammar.Text();
      continue;
    }
    ++compiled_grammars;
    for (int length = 0; length <= 7; ++length) {
      for (int code = 0; code < 1 << length; ++code) {
        std::string text;
        for (int i = 0; i < length; ++i) text += static_cast<char>('a' + ((code >> i) & 1));
        const bool expected = grammar.Matches(text);
        accepted += expected;
        ASSERT_EQ(Accepts(**compiled, text), expected) << text << "\n" << grammar.Text();
      }
    }
  }
  EXPECT_GT(compiled_grammars, 150);
  EXPECT_GT(accepted, 2000);
}

TEST(GrammarTest, LongRepetitionsAreFlat) {
  const auto compiled =
      Compile(ContextFree("root ::= item root | item\nitem ::= \"(\" item \")\" | \"x\""));
  EXPECT_TRUE(Accepts(*compiled, Repeated("(x)", 3000)));
  EXPECT_TRUE(Accepts(*compiled, Repeated("(", 500) + "x" + Repeated(")", 500)));
  EXPECT_FALSE(Accepts(*compiled, Repeated("(", 5000) + "x" + Repeated(")", 5000)))
      << "deeper than the limit";
}

}  // namespace
}  // namespace moeserve::testing

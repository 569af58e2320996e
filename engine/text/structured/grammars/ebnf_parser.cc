#include <algorithm>
#include <utility>

#include "engine/text/structured/grammars/grammar_reader.h"

namespace moeserve::structured {
namespace {

using ExprKind = GrammarExpr::Kind;

constexpr std::string_view kEbnfNameCharacters = "_-.";
constexpr std::string_view kComment = "#";

class EbnfParser {
 public:
  explicit EbnfParser(std::string_view text) : in_(text) {}

  Result<GrammarSyntax> Run() {
    GrammarSyntax out;
    out.root = "root";
    in_.SkipSpace(kComment);
    while (in_.ok() && !in_.AtEnd()) {
      GrammarRule rule;
      rule.name = in_.Name(kEbnfNameCharacters);
      in_.SkipSpace(kComment);
      if (rule.name.empty() || !in_.Accept("::=")) {
        in_.Fail("expected a rule, as in: name ::= \"text\"");
        break;
      }
      rule.body = Alternatives(0);
      out.rules.push_back(std::move(rule));
    }
    MOESERVE_RETURN_IF_ERROR(in_.status());
    return out;
  }

 private:
  // Whether the next rule begins here.
  bool AtRule() {
    const size_t begin = in_.pos();
    const bool named = !in_.Name(kEbnfNameCharacters).empty();
    in_.SkipSpace(kComment);
    const bool found = named && in_.LooksAt("::=");
    in_.set_pos(begin);
    return found;
  }

  GrammarExprPtr Alternatives(int depth) {
    GrammarExprPtr out = MakeExpr(ExprKind::kAlternatives);
    if (depth > kMaxGroupNesting) in_.Fail("groups are nested too deep");
    do {
      out->children.push_back(Sequence(depth));
    } while (in_.ok() && in_.Accept("|"));
    return out;
  }

  GrammarExprPtr Sequence(int depth) {
    GrammarExprPtr out = MakeExpr(ExprKind::kSequence);
    for (in_.SkipSpace(kComment); in_.ok() && !in_.AtEnd(); in_.SkipSpace(kComment)) {
      if (in_.Peek() == '|' || in_.Peek() == ')' || AtRule()) break;
      GrammarExprPtr item = Item(depth);
      if (!in_.ok()) break;
      out->children.push_back(Repetitions(std::move(item)));
    }
    if (in_.Peek() == ')' && depth == 0) in_.Fail("unmatched ')'");
    return out;
  }

  GrammarExprPtr Item(int depth) {
    if (in_.Accept("\"")) return MakeText(in_.Literal('"'));
    if (in_.Accept("'")) return MakeText(in_.Literal('\''));
    if (in_.Accept("[")) return Set(in_.Class());
    if (in_.Accept(".")) return Set(AllCharacters());
    if (in_.LooksAt("(=")) in_.Fail("look-ahead is not supported");
    if (in_.Accept("(")) {
      GrammarExprPtr group = Alternatives(depth + 1);
      if (!in_.Accept(")")) in_.Fail("a group has no ')'");
      return group;
    }
    GrammarExprPtr out = MakeExpr(ExprKind::kRule);
    out->rule = in_.Name(kEbnfNameCharacters);
    if (out->rule.empty()) in_.Fail("expected a literal, a class, a group or the name of a rule");
    if (in_.Peek() == '(') in_.Fail("\"" + out->rule.substr(0, 64) + "(...)\" is not supported");
    return out;
  }

  static GrammarExprPtr Set(CharSet set) {
    auto node = std::make_unique<PatternNode>();
    node->kind = PatternNode::Kind::kSet;
    node->set = std::move(set);
    return MakePattern(std::move(node));
  }

  GrammarExprPtr Repetitions(GrammarExprPtr item) {
    constexpr int kAny = PatternNode::kUnbounded;
    // Each repetition adds a level of nesting.
    for (int n = 0; in_.ok(); ++n) {
      if (n > kMaxRepetitions) in_.Fail("too many repetitions of one item");
      if (in_.Accept("*")) {
        item = MakeRepeat(std::move(item), 0, kAny);
      } else if (in_.Accept("+")) {
        item = MakeRepeat(std::move(item), 1, kAny);
      } else if (in_.Accept("?")) {
        item = MakeRepeat(std::move(item), 0, 1);
      } else if (in_.Accept("{")) {
        in_.SkipSpace(kComment);
        const int min = in_.Peek() == ',' ? 0 : in_.Number();
        int max = min;
        in_.SkipSpace(kComment);
        if (in_.Accept(",")) {
          in_.SkipSpace(kComment);
          max = in_.Peek() == '}' ? kAny : in_.Number();
          in_.SkipSpace(kComment);
        }
        if (!in_.Accept("}")) in_.Fail("a repetition count has no '}'");
        if (max != kAny && max < min) in_.Fail("the largest count is below the smallest one");
        item = MakeRepeat(std::move(item), min, max);
      } else {
        break;
      }
    }
    return item;
  }

  GrammarReader in_;
};

}  // namespace

Result<GrammarSyntax> ParseEbnf(std::string_view text) { return EbnfParser(text).Run(); }

namespace {

// Whether the text is in EBNF. The sign behind the first name decides; where there is none, whether
// a line has the sign of EBNF.
bool IsEbnf(std::string_view text) {
  // Comments begin with # in one notation and with // in the other one.
  GrammarReader in(text);
  in.SkipSpace("#", "//");
  if (in.LooksAt("%") || in.LooksAt("?") || in.LooksAt("!")) return false;
  if (!in.Name("_-").empty()) {
    in.SkipSpace("#", "//");
    if (in.LooksAt("::=")) return true;
    if (in.LooksAt(":")) return false;
  }
  for (size_t pos = 0; pos < text.size();) {
    const size_t end = std::min(text.find('\n', pos), text.size());
    std::string_view line = text.substr(pos, end - pos);
    line = line.substr(0, std::min(line.find('#'), line.find("//")));
    if (line.find("::=") != line.npos) return true;
    pos = end + 1;
  }
  return false;
}

}  // namespace

Result<GrammarSyntax> ParseGrammar(std::string_view text) {
  return IsEbnf(text) ? ParseEbnf(text) : ParseLark(text);
}

}  // namespace moeserve::structured

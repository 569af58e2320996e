#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/grammars/grammar_reader.h"

namespace moeserve::structured {
namespace {

using ExprKind = GrammarExpr::Kind;

constexpr std::string_view kLarkNameCharacters = "_";

// The terminals that %import can name. None refers to another one, because a grammar may give the
// name of that one another meaning.
constexpr std::pair<std::string_view, std::string_view> kCommon[] = {
    {"DIGIT", R"("0".."9")"},
    {"HEXDIGIT", R"(/[0-9A-Fa-f]/)"},
    {"INT", R"(/[0-9]+/)"},
    {"SIGNED_INT", R"(/[+-]?[0-9]+/)"},
    {"DECIMAL", R"(/[0-9]+\.[0-9]*|\.[0-9]+/)"},
    {"FLOAT", R"(/[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?/)"},
    {"SIGNED_FLOAT",
     R"(/[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)/)"},
    {"NUMBER", R"(/(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?/)"},
    {"SIGNED_NUMBER", R"(/[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?/)"},
    {"ESCAPED_STRING", R"(/"(?:[^"\\\n]|\\[^\n])*"/)"},
    {"LCASE_LETTER", R"("a".."z")"},
    {"UCASE_LETTER", R"("A".."Z")"},
    {"LETTER", R"(/[A-Za-z]/)"},
    {"WORD", R"(/[A-Za-z]+/)"},
    {"CNAME", R"(/[A-Za-z_][A-Za-z_0-9]*/)"},
    {"WS_INLINE", R"(/[ \t]+/)"},
    {"WS", R"(/[ \t\f\r\n]+/)"},
    {"CR", R"(/\r/)"},
    {"LF", R"(/\n/)"},
    {"NEWLINE", R"(/(?:\r?\n)+/)"},
    {"SH_COMMENT", R"(/#[^\n]*/)"},
    {"CPP_COMMENT", R"(/\/\/[^\n]*/)"},
    {"SQL_COMMENT", R"(/--[^\n]*/)"},
};

bool IsTerminal(const std::string& name) {
  return std::none_of(name.begin(), name.end(), [](char c) { return c >= 'a' && c <= 'z'; });
}

class LarkParser {
 public:
  explicit LarkParser(std::string_view text) : in_(text) {}

  Result<GrammarSyntax> Run() {
    SkipSpace();
    while (in_.ok() && !in_.AtEnd()) {
      if (in_.Accept("%")) {
        Directive();
      } else {
        Rule();
      }
      SkipSpace();
    }
    MOESERVE_RETURN_IF_ERROR(in_.status());
    MOESERVE_RETURN_IF_ERROR(AddCommon());
    AddIgnored();
    out_.root = "start";
    return std::move(out_);
  }

 private:
  void Rule() {
    // These marks change the tree that Lark builds, not the texts.
    while (in_.Accept("?") || in_.Accept("!")) {
    }
    GrammarRule rule;
    rule.name = in_.Name(kLarkNameCharacters);
    if (in_.LooksAt("{")) in_.Fail("templates are not supported");
    if (in_.Accept(".")) {
      in_.Accept("-");
      in_.Number();
    }
    SkipBlanks();
    if (rule.name.empty() || !in_.Accept(":")) {
      in_.Fail("expected a rule, as in: name: \"text\"");
      return;
    }
    in_terminal_ = IsTerminal(rule.name);
    rule.body = Alternatives(0);
    if (in_.ok()) out_.rules.push_back(std::move(rule));
  }

  void SkipSpace() { in_.SkipSpace("//", "#"); }

  void SkipBlanks() {
    while (in_.Peek() == ' ' || in_.Peek() == '\t') in_.Skip(1);
  }

  void Directive() {
    const std::string name = in_.Name(kLarkNameCharacters);
    SkipBlanks();
    if (name == "ignore") {
      in_terminal_ = true;
      ignored_.push_back(Alternatives(0));
      return;
    }
    if (name != "import") {
      in_.Fail("%" + name.substr(0, 64) + " is not supported");
      return;
    }
    if (!in_.Accept("common")) {
      in_.Fail("%import is supported for \"common\" only");
      return;
    }
    SkipBlanks();
    if (in_.Accept(".")) {
      const std::string imported = in_.Name(kLarkNameCharacters);
      SkipBlanks();
      std::string as = imported;
      if (in_.Accept("->")) {
        SkipBlanks();
        as = in_.Name(kLarkNameCharacters);
      }
      Import(imported, as);
      return;
    }
    if (!in_.Accept("(")) in_.Fail("expected a name or a list of names");
    do {
      SkipSpace();
      const std::string imported = in_.Name(kLarkNameCharacters);
      Import(imported, imported);
      SkipSpace();
    } while (in_.ok() && in_.Accept(","));
    if (!in_.Accept(")")) in_.Fail("a list of names has no ')'");
  }

  void Import(const std::string& name, const std::string& as) {
    const bool known = std::any_of(std::begin(kCommon), std::end(kCommon),
                                   [&](const auto& entry) { return entry.first == name; });
    if (!known) {
      in_.Fail("\"common\" has no terminal " + name.substr(0, 64) + " that is supported");
    } else {
      imported_.insert_or_assign(as, name);
    }
  }

  // Whether the next rule or directive begins here.
  bool AtRule() {
    if (in_.LooksAt("%")) return true;
    const size_t begin = in_.pos();
    while (in_.Accept("?") || in_.Accept("!")) {
    }
    const bool named = !in_.Name(kLarkNameCharacters).empty();
    bool found = named && in_.LooksAt("{");
    if (named && in_.Peek() == '.' && in_.Peek(1) != '.') {
      in_.Skip(1);
      while ((in_.Peek() >= '0' && in_.Peek() <= '9') || in_.Peek() == '-') in_.Skip(1);
    }
    SkipBlanks();
    found |= named && in_.LooksAt(":");
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
    for (SkipSpace(); in_.ok() && !in_.AtEnd(); SkipSpace()) {
      if (in_.Peek() == '|' || in_.Peek() == ')' || in_.Peek() == ']' || AtRule()) break;
      if (in_.Accept("->")) {
        SkipBlanks();
        in_.Name(kLarkNameCharacters);
        continue;
      }
      GrammarExprPtr item = Item(depth);
      if (!in_.ok()) break;
      out->children.push_back(Repetitions(std::move(item)));
    }
    if (depth == 0 && (in_.Peek() == ')' || in_.Peek() == ']')) in_.Fail("unmatched bracket");
    return out;
  }

  GrammarExprPtr Item(int depth) {
    if (in_.Accept("\"")) return Text();
    if (in_.Peek() == '/' && in_.Peek(1) != '/') return Pattern();
    if (in_.Accept("(")) {
      GrammarExprPtr group = Alternatives(depth + 1);
      if (!in_.Accept(")")) in_.Fail("a group has no ')'");
      return group;
    }
    if (in_.Accept("[")) {
      GrammarExprPtr group = Alternatives(depth + 1);
      if (!in_.Accept("]")) in_.Fail("an optional group has no ']'");
      return MakeRepeat(std::move(group), 0, 1);
    }
    const std::string name = in_.Name(kLarkNameCharacters);
    if (name.empty()) in_.Fail("expected a literal, a pattern, a group or a name");
    if (in_.Peek() == '{') in_.Fail("templates are not supported");
    GrammarExprPtr out = RuleNamed(name);
    return IsTerminal(name) ? Terminal(std::move(out)) : std::move(out);
  }

  static GrammarExprPtr RuleNamed(const std::string& name) {
    GrammarExprPtr out = MakeExpr(ExprKind::kRule);
    out->rule = name;
    return out;
  }

  // In a rule, ignored terminals may stand before every terminal.
  GrammarExprPtr Terminal(GrammarExprPtr terminal) {
    if (in_terminal_) return terminal;
    GrammarExprPtr out = MakeExpr(ExprKind::kSequence);
    out->children.push_back(RuleNamed(kIgnored));
    out->children.push_back(std::move(terminal));
    return out;
  }

  // Reads a literal, of which the opening quote is read, or a range of characters.
  GrammarExprPtr Text() {
    const std::string first = in_.Literal('"');
    if (in_.LooksAt("..")) {
      in_.Skip(2);
      if (!in_.Accept("\"")) in_.Fail("a range of characters has no end");
      const std::string last = in_.Literal('"');
      const GrammarExprPtr from = MakeText(first);
      const GrammarExprPtr to = MakeText(last);
      if (from->pattern->children.size() != 1 || to->pattern->children.size() != 1) {
        in_.Fail("the ends of a range must be single characters");
        return MakeText("");
      }
      auto set = std::make_unique<PatternNode>();
      set->kind = PatternNode::Kind::kSet;
      const CodePointRange range = {from->pattern->children[0]->set[0].first,
                                    to->pattern->children[0]->set[0].last};
      if (range.last < range.first) in_.Fail("a range is in the wrong order");
      set->set = Normalized({range});
      return Terminal(MakePattern(std::move(set)));
    }
    const bool ignore_case = in_.Accept("i");
    return Terminal(MakeText(first, ignore_case));
  }

  GrammarExprPtr Pattern() {
    in_.Skip(1);
    const size_t begin = in_.pos();
    bool in_class = false;
    while (!in_.AtEnd() && (in_.Peek() != '/' || in_class)) {
      if (in_.Peek() == '\n') break;
      if (in_.Peek() == '[') in_class = true;
      if (in_.Peek() == ']') in_class = false;
      in_.Skip(in_.Peek() == '\\' ? 2 : 1);
    }
    std::string text(in_.Since(begin));
    if (!in_.Accept("/")) in_.Fail("a pattern has no closing '/'");
    for (; in_.Peek() >= 'a' && in_.Peek() <= 'z'; in_.Skip(1)) {
      if (in_.Peek() == 'i') {
        text = "(?i)" + text;
      } else if (in_.Peek() != 'u') {
        in_.Fail("of the flags of patterns, only i and u are supported");
      }
    }
    if (!in_.ok()) return MakeText("");
    Result<std::unique_ptr<PatternNode>> tree = ParsePattern(text);
    if (!tree.ok()) {
      in_.Fail(std::string(tree.status().message()));
      return MakeText("");
    }
    return Terminal(MakePattern(*std::move(tree)));
  }

  GrammarExprPtr Repetitions(GrammarExprPtr item) {
    constexpr int kAny = PatternNode::kUnbounded;
    for (int n = 0; in_.ok(); ++n) {
      if (n > kMaxRepetitions) in_.Fail("too many repetitions of one item");
      if (in_.Accept("*")) {
        item = MakeRepeat(std::move(item), 0, kAny);
      } else if (in_.Accept("+")) {
        item = MakeRepeat(std::move(item), 1, kAny);
      } else if (in_.Peek() == '?' && !AtRule()) {
        in_.Skip(1);
        item = MakeRepeat(std::move(item), 0, 1);
      } else {
        SkipBlanks();
        if (!in_.Accept("~")) break;
        SkipBlanks();
        const int min = in_.Number();
        const int max = in_.Accept("..") ? in_.Number() : min;
        if (max < min) in_.Fail("the largest count is below the smallest one");
        item = MakeRepeat(std::move(item), min, max);
      }
    }
    return item;
  }

  // Adds rules for the imported terminals.
  Status AddCommon() {
    std::set<std::string> defined;
    for (const GrammarRule& rule : out_.rules) defined.insert(rule.name);
    for (const auto& import : imported_) {
      const std::string& as = import.first;
      const std::string& name = import.second;
      if (defined.contains(as)) continue;
      const auto* common = std::find_if(std::begin(kCommon), std::end(kCommon),
                                        [&](const auto& entry) { return entry.first == name; });
      LarkParser parser(common->second);
      parser.in_terminal_ = true;
      GrammarRule rule;
      rule.name = as;
      rule.body = parser.Alternatives(0);
      MOESERVE_RETURN_IF_ERROR(parser.in_.status());
      out_.rules.push_back(std::move(rule));
    }
    return absl::OkStatus();
  }

  void AddIgnored() {
    GrammarExprPtr any = MakeExpr(ExprKind::kAlternatives);
    for (GrammarExprPtr& ignored : ignored_) any->children.push_back(std::move(ignored));
    GrammarRule rule;
    rule.name = kIgnored;
    if (any->children.empty()) {
      rule.body = MakeText("");
    } else {
      rule.body = MakeRepeat(std::move(any), 0, PatternNode::kUnbounded);
    }
    for (GrammarRule& start : out_.rules) {
      if (start.name != "start" || rule.body->kind != ExprKind::kRepeat) continue;
      GrammarExprPtr whole = MakeExpr(ExprKind::kSequence);
      whole->children.push_back(std::move(start.body));
      whole->children.push_back(RuleNamed(kIgnored));
      start.body = std::move(whole);
    }
    out_.rules.push_back(std::move(rule));
  }

  // The rule of all ignored terminals. No grammar can contain this name.
  static inline const std::string kIgnored = "%ignore";

  GrammarReader in_;
  GrammarSyntax out_;
  bool in_terminal_ = false;
  std::vector<GrammarExprPtr> ignored_;
  std::map<std::string, std::string> imported_;  // the names that %import gives, by their meanings
};

}  // namespace

Result<GrammarSyntax> ParseLark(std::string_view text) { return LarkParser(text).Run(); }

}  // namespace moeserve::structured

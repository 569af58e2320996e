// The syntax tree of context-free grammars, and the parsers of the two notations.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/structured/automata/pattern_syntax.h"

namespace moeserve::structured {

struct GrammarExpr {
  enum class Kind { kPattern, kRule, kSequence, kAlternatives, kRepeat };

  Kind kind = Kind::kSequence;
  std::unique_ptr<PatternNode> pattern;                // kPattern; without ^ and $
  std::string rule;                                    // kRule: its name
  std::vector<std::unique_ptr<GrammarExpr>> children;  // kRepeat has exactly one child
  int min = 0;                                         // kRepeat
  int max = PatternNode::kUnbounded;                   // kRepeat
};

using GrammarExprPtr = std::unique_ptr<GrammarExpr>;

struct GrammarRule {
  std::string name;
  GrammarExprPtr body;
};

struct GrammarSyntax {
  std::vector<GrammarRule> rules;
  std::string root;  // the name of the rule that describes the whole text
};

GrammarExprPtr MakeExpr(GrammarExpr::Kind kind);
GrammarExprPtr MakePattern(std::unique_ptr<PatternNode> pattern);
// Returns an expression for exactly `text` (UTF-8). If `ignore_case`, ASCII letters match both
// cases.
GrammarExprPtr MakeText(std::string_view text, bool ignore_case = false);
GrammarExprPtr MakeRepeat(GrammarExprPtr child, int min, int max);
std::unique_ptr<PatternNode> Copy(const PatternNode& node);

// Parses a grammar, which must be UTF-8. Errors are InvalidArgument with the line.
//
// ParseEbnf() reads the notation of llama.cpp (GBNF) and XGrammar: rules `name ::= ...`, of which
// "root" describes the whole text; literals, classes ([^a-z]), `.`, groups, |, *, +, ?, {m}, {m,}
// and {m,n}; comments from # to the end of the line.
Result<GrammarSyntax> ParseEbnf(std::string_view text);
// ParseLark() reads the notation of the parser generator Lark: rules `name: ...`, of which "start"
// describes the whole text, and terminals `NAME: ...`; literals ("..."i), /patterns/ (with the flag
// i), ranges ("a".."z"), groups, [optional], |, *, +, ?, ~m and ~m..n; %ignore and %import of the
// usual terminals of "common". Priorities and aliases have no effect. Where several terminals
// match, all ways to divide the text into terminals are allowed.
Result<GrammarSyntax> ParseLark(std::string_view text);
// Uses ParseEbnf() if the text contains "::=" outside of comments, otherwise ParseLark().
Result<GrammarSyntax> ParseGrammar(std::string_view text);

}  // namespace moeserve::structured

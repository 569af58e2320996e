// A parser of template expressions, which also keeps the position in the template's tokens.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/chat/ast.h"
#include "engine/text/chat/lexer.h"

namespace moeserve::chat {

// All functions throw TemplateError with the line number.
class ExpressionParser {
 public:
  // The last element of `tokens` is kEnd. The tokens must outlive this object.
  explicit ExpressionParser(std::span<const Token> tokens) : tokens_(tokens) {}

  const Token& current() const { return tokens_[pos_]; }
  int line() const { return current().line; }
  void Advance() {
    if (current().kind != TokenKind::kEnd) ++pos_;
  }
  [[noreturn]] void FailHere(std::string message) const;

  bool IsName(std::string_view name) const;
  bool IsOperator(std::string_view op) const;
  bool SkipName(std::string_view name);
  bool SkipOperator(std::string_view op);
  std::string TakeName();
  void Expect(TokenKind kind, std::string_view shown);
  void ExpectOperator(std::string_view op);

  // Parses one expression. `conditional`: also accepts `a if b else c`.
  ExprPtr ParseExpression(bool conditional = true);
  // Parses one expression, or a tuple if commas follow.
  ExprPtr ParseTuple(bool conditional = true);
  // Parses the filters and tests after `operand`. `inside_tag`: the first filter has no `|` before
  // its name, as in {% filter name %}.
  ExprPtr ParseFilters(ExprPtr operand, bool inside_tag = false);

 private:
  class Nesting;

  ExprPtr Make(ExprKind kind, std::vector<ExprPtr> children = {}) const;
  ExprPtr ParseOr();
  ExprPtr ParseAnd();
  ExprPtr ParseNot();
  ExprPtr ParseComparison();
  ExprPtr ParseSum();
  ExprPtr ParseConcat();
  ExprPtr ParseProduct();
  ExprPtr ParsePower();
  ExprPtr ParseUnary(bool with_filters = true);
  ExprPtr ParsePrimary();
  ExprPtr ParseNumber();
  ExprPtr ParseParentheses();
  ExprPtr ParseList();
  ExprPtr ParseDict();
  ExprPtr ParsePostfix(ExprPtr operand);
  ExprPtr ParseSubscript(ExprPtr operand);
  ExprPtr ParseTest(ExprPtr operand);
  // Parses the arguments in parentheses and adds them to a call, filter or test.
  void ParseArguments(Expr& call);
  bool AtEndOfTuple() const;
  static void Deepen(Expr& parent, const ExprPtr& child);

  std::span<const Token> tokens_;
  size_t pos_ = 0;
  int nesting_ = 0;
};

}  // namespace moeserve::chat

// Parses expressions, and is the cursor over a template's tokens.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/chat/ast.h"
#include "engine/text/chat/lexer.h"

namespace moeserve::chat {

// All functions throw TemplateError with the line.
class ExpressionParser {
 public:
  // `tokens`, the last of which is kEnd, must outlive this.
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

  // `conditional`: `a if b else c` is taken.
  ExprPtr ParseExpression(bool conditional = true);
  // Several of them with commas between are a tuple.
  ExprPtr ParseTuple(bool conditional = true);
  // The filters and tests after `operand`; `inside_tag`: the first has no `|` before it.
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
  // Adds the arguments in parentheses to a call, filter or test.
  void ParseArguments(Expr& call);
  bool AtEndOfTuple() const;
  static void Deepen(Expr& parent, const ExprPtr& child);

  std::span<const Token> tokens_;
  size_t pos_ = 0;
  int nesting_ = 0;
};

}  // namespace moeserve::chat

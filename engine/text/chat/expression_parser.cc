#include "engine/text/chat/expression_parser.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace moeserve::chat {
namespace {

constexpr int kMaxNesting = 60;  // nesting of brackets, signs and similar constructs

template <typename... Exprs>
std::vector<ExprPtr> Children(Exprs... exprs) {
  std::vector<ExprPtr> out;
  (out.push_back(std::move(exprs)), ...);
  return out;
}

}  // namespace

class ExpressionParser::Nesting {
 public:
  explicit Nesting(ExpressionParser* parser) : parser_(parser) {
    if (++parser_->nesting_ > kMaxNesting) parser_->FailHere("expressions are nested too deeply");
  }
  ~Nesting() { --parser_->nesting_; }

 private:
  ExpressionParser* const parser_;
};

void ExpressionParser::FailHere(std::string message) const {
  throw TemplateError{std::move(message), false, line()};
}

bool ExpressionParser::IsName(std::string_view name) const {
  return current().kind == TokenKind::kName && current().text == name;
}

bool ExpressionParser::IsOperator(std::string_view op) const {
  return current().kind == TokenKind::kOperator && current().text == op;
}

bool ExpressionParser::SkipName(std::string_view name) {
  if (!IsName(name)) return false;
  Advance();
  return true;
}

bool ExpressionParser::SkipOperator(std::string_view op) {
  if (!IsOperator(op)) return false;
  Advance();
  return true;
}

std::string ExpressionParser::TakeName() {
  if (current().kind != TokenKind::kName) FailHere("expected a name");
  std::string name = current().text;
  Advance();
  return name;
}

void ExpressionParser::Expect(TokenKind kind, std::string_view shown) {
  if (current().kind != kind) {
    FailHere("expected '" + std::string(shown) + "'" +
             (current().text.empty() ? "" : ", found '" + current().text.substr(0, 64) + "'"));
  }
  Advance();
}

void ExpressionParser::ExpectOperator(std::string_view op) {
  if (!IsOperator(op)) Expect(TokenKind::kEnd, op);
  Advance();
}

void ExpressionParser::Deepen(Expr& parent, const ExprPtr& child) {
  if (child != nullptr) parent.depth = std::max(parent.depth, child->depth + 1);
}

ExprPtr ExpressionParser::Make(ExprKind kind, std::vector<ExprPtr> children) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = line();
  for (const ExprPtr& child : children) Deepen(*expr, child);
  expr->children = std::move(children);
  if (expr->depth > kMaxTreeDepth) FailHere("an expression is too long or nested too deeply");
  return expr;
}

ExprPtr ExpressionParser::ParseExpression(bool conditional) {
  const Nesting nesting(this);
  ExprPtr expr = ParseOr();
  while (conditional && SkipName("if")) {
    ExprPtr condition = ParseOr();
    ExprPtr otherwise = SkipName("else") ? ParseExpression() : nullptr;
    expr = Make(ExprKind::kConditional,
                Children(std::move(expr), std::move(condition), std::move(otherwise)));
  }
  return expr;
}

bool ExpressionParser::AtEndOfTuple() const {
  const TokenKind kind = current().kind;
  return kind == TokenKind::kPrintEnd || kind == TokenKind::kBlockEnd || kind == TokenKind::kEnd ||
         IsOperator(")");
}

ExprPtr ExpressionParser::ParseTuple(bool conditional) {
  std::vector<ExprPtr> elements;
  bool is_tuple = false;
  while (true) {
    if (AtEndOfTuple()) break;
    elements.push_back(ParseExpression(conditional));
    if (!SkipOperator(",")) break;
    is_tuple = true;
  }
  if (elements.empty()) FailHere("expected an expression");
  if (!is_tuple) return std::move(elements.front());
  return Make(ExprKind::kTuple, std::move(elements));
}

ExprPtr ExpressionParser::ParseOr() {
  ExprPtr left = ParseAnd();
  while (SkipName("or")) {
    ExprPtr right = ParseAnd();
    left = Make(ExprKind::kOr, Children(std::move(left), std::move(right)));
  }
  return left;
}

ExprPtr ExpressionParser::ParseAnd() {
  ExprPtr left = ParseNot();
  while (SkipName("and")) {
    ExprPtr right = ParseNot();
    left = Make(ExprKind::kAnd, Children(std::move(left), std::move(right)));
  }
  return left;
}

ExprPtr ExpressionParser::ParseNot() {
  if (!SkipName("not")) return ParseComparison();
  const Nesting nesting(this);
  return Make(ExprKind::kNot, Children(ParseNot()));
}

ExprPtr ExpressionParser::ParseComparison() {
  constexpr std::pair<std::string_view, CompareOp> kOperators[] = {
      {"==", CompareOp::kEqual},  {"!=", CompareOp::kNotEqual},
      {"<", CompareOp::kLess},    {"<=", CompareOp::kLessEqual},
      {">", CompareOp::kGreater}, {">=", CompareOp::kGreaterEqual}};
  std::vector<ExprPtr> operands = Children(ParseSum());
  std::vector<CompareOp> compare;
  while (true) {
    if (current().kind == TokenKind::kOperator) {
      const auto it = std::find_if(std::begin(kOperators), std::end(kOperators),
                                   [&](const auto& op) { return op.first == current().text; });
      if (it == std::end(kOperators)) break;
      compare.push_back(it->second);
    } else if (IsName("in")) {
      compare.push_back(CompareOp::kIn);
    } else if (IsName("not") && pos_ + 1 < tokens_.size() &&
               tokens_[pos_ + 1].kind == TokenKind::kName && tokens_[pos_ + 1].text == "in") {
      compare.push_back(CompareOp::kNotIn);
      Advance();
    } else {
      break;
    }
    Advance();
    operands.push_back(ParseSum());
  }
  if (compare.empty()) return std::move(operands.front());
  ExprPtr expr = Make(ExprKind::kCompare, std::move(operands));
  expr->compare = std::move(compare);
  return expr;
}

ExprPtr ExpressionParser::ParseSum() {
  ExprPtr left = ParseConcat();
  while (IsOperator("+") || IsOperator("-")) {
    const BinaryOp op = IsOperator("+") ? BinaryOp::kAdd : BinaryOp::kSubtract;
    Advance();
    ExprPtr right = ParseConcat();
    left = Make(ExprKind::kBinary, Children(std::move(left), std::move(right)));
    left->op = op;
  }
  return left;
}

ExprPtr ExpressionParser::ParseConcat() {
  std::vector<ExprPtr> operands = Children(ParseProduct());
  while (SkipOperator("~")) operands.push_back(ParseProduct());
  if (operands.size() == 1) return std::move(operands.front());
  return Make(ExprKind::kConcat, std::move(operands));
}

ExprPtr ExpressionParser::ParseProduct() {
  constexpr std::pair<std::string_view, BinaryOp> kOperators[] = {{"*", BinaryOp::kMultiply},
                                                                  {"/", BinaryOp::kDivide},
                                                                  {"//", BinaryOp::kFloorDivide},
                                                                  {"%", BinaryOp::kModulo}};
  ExprPtr left = ParsePower();
  while (true) {
    const auto it = std::find_if(std::begin(kOperators), std::end(kOperators),
                                 [&](const auto& op) { return IsOperator(op.first); });
    if (it == std::end(kOperators)) return left;
    Advance();
    ExprPtr right = ParsePower();
    left = Make(ExprKind::kBinary, Children(std::move(left), std::move(right)));
    left->op = it->second;
  }
}

ExprPtr ExpressionParser::ParsePower() {
  ExprPtr left = ParseUnary();
  while (SkipOperator("**")) {
    ExprPtr right = ParseUnary();
    left = Make(ExprKind::kBinary, Children(std::move(left), std::move(right)));
    left->op = BinaryOp::kPower;
  }
  return left;
}

ExprPtr ExpressionParser::ParseUnary(bool with_filters) {
  ExprPtr expr;
  if (IsOperator("-") || IsOperator("+")) {
    const Nesting nesting(this);
    const ExprKind kind = IsOperator("-") ? ExprKind::kNegate : ExprKind::kPositive;
    Advance();
    expr = Make(kind, Children(ParseUnary(false)));
  } else {
    expr = ParsePrimary();
  }
  expr = ParsePostfix(std::move(expr));
  return with_filters ? ParseFilters(std::move(expr)) : std::move(expr);
}

ExprPtr ExpressionParser::ParsePrimary() {
  const Token& token = current();
  switch (token.kind) {
    case TokenKind::kName: {
      ExprPtr expr = Make(ExprKind::kConstant);
      const std::string& name = token.text;
      if (name == "true" || name == "True") {
        expr->constant = true;
      } else if (name == "false" || name == "False") {
        expr->constant = false;
      } else if (name == "none" || name == "None") {
        expr->constant = None{};
      } else {
        expr->kind = ExprKind::kName;
        expr->name = name;
      }
      Advance();
      return expr;
    }
    case TokenKind::kString: {
      ExprPtr expr = Make(ExprKind::kConstant);
      std::string text;
      for (; current().kind == TokenKind::kString; Advance()) text += current().text;
      expr->constant = Text(std::move(text), true);
      return expr;
    }
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return ParseNumber();
    default:
      break;
  }
  if (IsOperator("(")) return ParseParentheses();
  if (IsOperator("[")) return ParseList();
  if (IsOperator("{")) return ParseDict();
  FailHere("expected an expression" +
           (token.text.empty() ? std::string() : ", found '" + token.text.substr(0, 64) + "'"));
}

ExprPtr ExpressionParser::ParseNumber() {
  ExprPtr expr = Make(ExprKind::kConstant);
  const std::string& text = current().text;
  const char* const end = text.data() + text.size();
  if (current().kind == TokenKind::kFloat) {
    double value = 0.0;
    if (std::from_chars(text.data(), end, value).ec != std::errc()) {
      value = std::strtod(text.c_str(), nullptr);
    }
    expr->constant = value;
  } else {
    const char mark = text.size() > 2 ? static_cast<char>(text[1] | 0x20) : '\0';
    const int base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
    int64_t value = 0;
    const auto [stop, error] =
        std::from_chars(text.data() + (base == 10 ? 0 : 2), end, value, base);
    if (error != std::errc() || stop != end) FailHere("not a number of 64 bits: " + text);
    if (base == 10 && text[0] == '0' && value != 0) FailHere("a number starts with 0: " + text);
    expr->constant = value;
  }
  Advance();
  return expr;
}

ExprPtr ExpressionParser::ParseParentheses() {
  const Nesting nesting(this);
  Advance();
  if (IsOperator(")")) {
    Advance();
    return Make(ExprKind::kTuple);
  }
  ExprPtr expr = ParseTuple();
  ExpectOperator(")");
  return expr;
}

ExprPtr ExpressionParser::ParseList() {
  const Nesting nesting(this);
  Advance();
  std::vector<ExprPtr> elements;
  while (!SkipOperator("]")) {
    if (!elements.empty()) {
      ExpectOperator(",");
      if (SkipOperator("]")) break;
    }
    elements.push_back(ParseExpression());
  }
  return Make(ExprKind::kList, std::move(elements));
}

ExprPtr ExpressionParser::ParseDict() {
  const Nesting nesting(this);
  Advance();
  std::vector<ExprPtr> elements;
  while (!SkipOperator("}")) {
    if (!elements.empty()) {
      ExpectOperator(",");
      if (SkipOperator("}")) break;
    }
    elements.push_back(ParseExpression());
    ExpectOperator(":");
    elements.push_back(ParseExpression());
  }
  return Make(ExprKind::kDict, std::move(elements));
}

ExprPtr ExpressionParser::ParsePostfix(ExprPtr operand) {
  while (true) {
    if (SkipOperator(".")) {
      if (current().kind == TokenKind::kInteger) {
        operand = Make(ExprKind::kItem, Children(std::move(operand), ParseNumber()));
      } else {
        const std::string name = TakeName();
        operand = Make(ExprKind::kAttribute, Children(std::move(operand)));
        operand->name = name;
      }
    } else if (IsOperator("[")) {
      operand = ParseSubscript(std::move(operand));
    } else if (IsOperator("(")) {
      operand = Make(ExprKind::kCall, Children(std::move(operand)));
      ParseArguments(*operand);
    } else {
      return operand;
    }
  }
}

ExprPtr ExpressionParser::ParseSubscript(ExprPtr operand) {
  const Nesting nesting(this);
  Advance();
  ExprPtr begin = IsOperator(":") ? nullptr : ParseExpression();
  if (IsOperator(",")) FailHere("several subscripts are not supported");
  if (SkipOperator("]"))
    return Make(ExprKind::kItem, Children(std::move(operand), std::move(begin)));
  ExprPtr end;
  ExprPtr step;
  ExpectOperator(":");
  if (!IsOperator("]") && !IsOperator(":")) end = ParseExpression();
  if (SkipOperator(":") && !IsOperator("]")) step = ParseExpression();
  ExpectOperator("]");
  return Make(ExprKind::kSlice,
              Children(std::move(operand), std::move(begin), std::move(end), std::move(step)));
}

ExprPtr ExpressionParser::ParseFilters(ExprPtr operand, bool inside_tag) {
  // The filters of a tag have no operand in the template; only filters may follow them.
  const bool has_operand = operand != nullptr;
  while (true) {
    if (inside_tag || SkipOperator("|")) {
      inside_tag = false;
      std::string name = TakeName();
      while (SkipOperator(".")) name += "." + TakeName();
      operand = Make(ExprKind::kFilter, Children(std::move(operand)));
      operand->name = std::move(name);
      if (IsOperator("(")) ParseArguments(*operand);
    } else if (has_operand && SkipName("is")) {
      operand = ParseTest(std::move(operand));
    } else if (has_operand && IsOperator("(")) {
      operand = Make(ExprKind::kCall, Children(std::move(operand)));
      ParseArguments(*operand);
    } else {
      return operand;
    }
  }
}

ExprPtr ExpressionParser::ParseTest(ExprPtr operand) {
  const Nesting nesting(this);
  const bool negated = SkipName("not");
  std::string name = TakeName();
  while (SkipOperator(".")) name += "." + TakeName();
  ExprPtr test = Make(ExprKind::kTest, Children(std::move(operand)));
  test->name = std::move(name);
  const TokenKind kind = current().kind;
  if (IsOperator("(")) {
    ParseArguments(*test);
  } else if (kind == TokenKind::kString || kind == TokenKind::kInteger ||
             kind == TokenKind::kFloat || IsOperator("[") || IsOperator("{") ||
             (kind == TokenKind::kName && !IsName("else") && !IsName("or") && !IsName("and"))) {
    if (IsName("is")) FailHere("tests cannot be chained");
    // A keyword that continues the expression is not an argument of the test.
    if (!IsName("if") && !IsName("not") && !IsName("in") && !IsName("recursive")) {
      ExprPtr argument = ParsePostfix(ParsePrimary());
      Deepen(*test, argument);
      test->children.push_back(std::move(argument));
    }
  }
  if (test->depth > kMaxTreeDepth) FailHere("an expression is nested too deeply");
  if (!negated) return test;
  return Make(ExprKind::kNot, Children(std::move(test)));
}

void ExpressionParser::ParseArguments(Expr& call) {
  const Nesting nesting(this);
  Advance();
  bool first = true;
  while (!SkipOperator(")")) {
    if (!first) {
      ExpectOperator(",");
      if (SkipOperator(")")) break;
    }
    first = false;
    if (IsOperator("*") || IsOperator("**")) {
      ExprPtr& spread = IsOperator("*") ? call.spread : call.named_spread;
      if (spread != nullptr) FailHere("arguments are spread twice");
      Advance();
      spread = ParseExpression();
      Deepen(call, spread);
      continue;
    }
    const bool is_named = current().kind == TokenKind::kName && pos_ + 1 < tokens_.size() &&
                          tokens_[pos_ + 1].kind == TokenKind::kOperator &&
                          tokens_[pos_ + 1].text == "=";
    ExprPtr value;
    if (is_named) {
      std::string name = TakeName();
      Advance();
      value = ParseExpression();
      Deepen(call, value);
      call.named.emplace_back(std::move(name), std::move(value));
    } else {
      if (!call.named.empty()) FailHere("a positional argument follows a named one");
      value = ParseExpression();
      Deepen(call, value);
      call.children.push_back(std::move(value));
    }
  }
  if (call.depth > kMaxTreeDepth) FailHere("an expression is nested too deeply");
}

}  // namespace moeserve::chat

#include "engine/text/chat/parser.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "engine/text/chat/expression_parser.h"
#include "engine/text/chat/lexer.h"

namespace moeserve::chat {
namespace {

constexpr int kMaxBlockDepth = 60;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(Tokenize(source)), in_(tokens_) {}

  Body Run() {
    Body body = ParseBody({});
    return body;
  }

 private:
  std::unique_ptr<Stmt> Make(StmtKind kind) const {
    auto stmt = std::make_unique<Stmt>();
    stmt->kind = kind;
    stmt->line = in_.line();
    return stmt;
  }

  // Parses statements up to a tag whose name is in `ends`; that name is then the current token. If
  // `ends` is empty, parses up to the end of the template.
  Body ParseBody(std::initializer_list<std::string_view> ends) {
    Body body;
    if (++depth_ > kMaxBlockDepth) in_.FailHere("tags are nested too deeply");
    while (true) {
      const Token& token = in_.current();
      if (token.kind == TokenKind::kEnd) {
        if (ends.size() == 0) break;
        in_.FailHere("expected {% " + std::string(*ends.begin()) + " %}, found the end");
      }
      if (token.kind == TokenKind::kData) {
        body.push_back(Make(StmtKind::kData));
        body.back()->data = Text(token.text, true);
        in_.Advance();
      } else if (token.kind == TokenKind::kPrintBegin) {
        in_.Advance();
        body.push_back(Make(StmtKind::kPrint));
        body.back()->expr = in_.ParseTuple();
        in_.Expect(TokenKind::kPrintEnd, "}}");
      } else {
        in_.Advance();  // {%
        if (in_.current().kind != TokenKind::kName) in_.FailHere("expected the name of a tag");
        if (std::find(ends.begin(), ends.end(), in_.current().text) != ends.end()) break;
        if (auto stmt = ParseTag()) body.push_back(std::move(stmt));
      }
    }
    --depth_;
    return body;
  }

  void EndTag() { in_.Expect(TokenKind::kBlockEnd, "%}"); }
  Body ParseBlock(std::string_view end) {
    EndTag();
    Body body = ParseBody({end});
    in_.Advance();
    EndTag();
    return body;
  }

  std::unique_ptr<Stmt> ParseTag() {
    const std::string name = in_.current().text;
    const auto is = [&](std::string_view n) { return name == n; };
    if (is("if")) return ParseIf();
    if (is("for")) return ParseFor();
    if (is("set")) return ParseSet();
    if (is("macro")) return ParseMacro();
    if (is("call")) return ParseCall();
    if (is("filter")) return ParseFilterBlock();
    if (is("with")) return ParseWith();
    if (is("generation")) {
      auto stmt = Make(StmtKind::kScope);
      in_.Advance();
      stmt->body = ParseBlock("endgeneration");
      return stmt;
    }
    if (is("break") || is("continue")) {
      if (loops_ == 0) in_.FailHere("{% " + name + " %} outside a loop");
      auto stmt = Make(is("break") ? StmtKind::kBreak : StmtKind::kContinue);
      in_.Advance();
      EndTag();
      return stmt;
    }
    in_.FailHere("the tag '" + name.substr(0, 64) + "' is not expected here or not supported");
  }

  std::unique_ptr<Stmt> ParseIf() {
    auto stmt = Make(StmtKind::kIf);
    while (true) {
      in_.Advance();  // skips `if` or `elif`
      ExprPtr condition = in_.ParseTuple(/*conditional=*/false);
      EndTag();
      Body body = ParseBody({"elif", "else", "endif"});
      stmt->branches.emplace_back(std::move(condition), std::move(body));
      if (in_.IsName("elif")) continue;
      if (in_.SkipName("else")) {
        stmt->otherwise = ParseBlock("endif");
        return stmt;
      }
      in_.Advance();
      EndTag();
      return stmt;
    }
  }

  std::unique_ptr<Stmt> ParseFor() {
    auto stmt = Make(StmtKind::kFor);
    in_.Advance();
    stmt->target = ParseTarget(/*attributes=*/false);
    if (!in_.SkipName("in")) in_.FailHere("expected 'in'");
    stmt->expr = in_.ParseTuple(/*conditional=*/false);
    if (in_.SkipName("if")) stmt->condition = in_.ParseExpression();
    if (in_.IsName("recursive")) in_.FailHere("recursive loops are not supported");
    EndTag();
    ++loops_;
    stmt->body = ParseBody({"endfor", "else"});
    --loops_;
    if (in_.SkipName("else")) {
      stmt->otherwise = ParseBlock("endfor");
    } else {
      in_.Advance();
      EndTag();
    }
    return stmt;
  }

  std::unique_ptr<Stmt> ParseSet() {
    auto stmt = Make(StmtKind::kSet);
    in_.Advance();
    stmt->target = ParseTarget(/*attributes=*/true);
    if (in_.SkipOperator("=")) {
      stmt->expr = in_.ParseTuple();
      EndTag();
      return stmt;
    }
    stmt->kind = StmtKind::kSetBlock;
    if (in_.IsOperator("|")) stmt->expr = in_.ParseFilters(nullptr);
    stmt->body = ParseScopedBlock("endset");
    return stmt;
  }

  // Parses a block inside which `break` and `continue` cannot refer to a loop around the block.
  Body ParseScopedBlock(std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    Body body = ParseBlock(end);
    loops_ = loops;
    return body;
  }

  std::unique_ptr<Stmt> ParseMacro() {
    auto stmt = Make(StmtKind::kMacro);
    in_.Advance();
    stmt->macro.name = in_.TakeName();
    ParseSignature(stmt->macro);
    stmt->macro.body = ParseScopedBlock("endmacro");
    return stmt;
  }

  std::unique_ptr<Stmt> ParseCall() {
    auto stmt = Make(StmtKind::kCall);
    in_.Advance();
    stmt->macro.name = "caller";
    if (in_.IsOperator("(")) ParseSignature(stmt->macro);
    stmt->expr = in_.ParseExpression();
    if (stmt->expr->kind != ExprKind::kCall) in_.FailHere("expected a call");
    stmt->macro.body = ParseScopedBlock("endcall");
    return stmt;
  }

  void ParseSignature(MacroNode& macro) {
    in_.ExpectOperator("(");
    while (!in_.SkipOperator(")")) {
      if (!macro.parameters.empty()) {
        in_.ExpectOperator(",");
        if (in_.SkipOperator(")")) break;
      }
      macro.parameters.push_back(in_.TakeName());
      if (in_.SkipOperator("=")) {
        macro.defaults.push_back(in_.ParseExpression());
      } else if (!macro.defaults.empty()) {
        in_.FailHere("a parameter without a default follows one with a default");
      }
    }
  }

  std::unique_ptr<Stmt> ParseFilterBlock() {
    auto stmt = Make(StmtKind::kFilter);
    in_.Advance();
    stmt->expr = in_.ParseFilters(nullptr, /*inside_tag=*/true);
    stmt->body = ParseScopedBlock("endfilter");
    return stmt;
  }

  std::unique_ptr<Stmt> ParseWith() {
    auto stmt = Make(StmtKind::kWith);
    in_.Advance();
    while (in_.current().kind != TokenKind::kBlockEnd) {
      if (!stmt->bindings.empty()) in_.ExpectOperator(",");
      Target target = ParseTarget(/*attributes=*/false);
      in_.ExpectOperator("=");
      stmt->bindings.emplace_back(std::move(target), in_.ParseExpression());
    }
    stmt->body = ParseBlock("endwith");
    return stmt;
  }

  Target ParseTarget(bool attributes) {
    std::vector<Target> elements;
    bool is_tuple = false;
    do {
      if (is_tuple && (in_.IsName("in") || in_.IsOperator("=") || in_.IsOperator(")"))) break;
      elements.push_back(ParseOneTarget(attributes));
      if (in_.IsOperator(",")) is_tuple = true;
    } while (in_.SkipOperator(","));
    if (!is_tuple) return std::move(elements.front());
    Target target;
    target.elements = std::move(elements);
    return target;
  }

  Target ParseOneTarget(bool attributes) {
    if (in_.SkipOperator("(")) {
      if (++depth_ > kMaxBlockDepth) in_.FailHere("targets are nested too deeply");
      Target target = ParseTarget(attributes);
      --depth_;
      in_.ExpectOperator(")");
      return target;
    }
    Target target;
    target.name = in_.TakeName();
    if (attributes && in_.SkipOperator(".")) {
      target.attribute = in_.TakeName();
      return target;
    }
    for (const char* reserved : {"true", "false", "none", "True", "False", "None"}) {
      if (target.name == reserved) in_.FailHere("can't assign to '" + target.name + "'");
    }
    return target;
  }

  const std::vector<Token> tokens_;
  ExpressionParser in_;
  int depth_ = 0;
  int loops_ = 0;
};

}  // namespace

Body ParseTemplate(std::string_view source) { return Parser(source).Run(); }

}  // namespace moeserve::chat

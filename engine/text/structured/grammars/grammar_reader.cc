#include "engine/text/structured/grammars/grammar_reader.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

}  // namespace

void GrammarReader::SkipSpace(std::string_view comment, std::string_view other_comment) {
  while (!AtEnd()) {
    if (IsSpace(Peek())) {
      ++pos_;
    } else if (LooksAt(comment) || (!other_comment.empty() && LooksAt(other_comment))) {
      while (!AtEnd() && Peek() != '\n') ++pos_;
    } else {
      return;
    }
  }
}

std::string GrammarReader::Name(std::string_view more) {
  const size_t begin = pos_;
  while (!AtEnd()) {
    const char c = Peek();
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool digit = c >= '0' && c <= '9';
    if (!letter && !(digit && pos_ > begin) && more.find(c) == more.npos) break;
    ++pos_;
  }
  return std::string(Since(begin));
}

int GrammarReader::Number() {
  int value = 0;
  const size_t begin = pos_;
  while (Peek() >= '0' && Peek() <= '9') {
    value = std::min(10 * value + (Peek() - '0'), kMaxRepeatCount + 1);
    ++pos_;
  }
  if (pos_ == begin) Fail("a number is missing");
  if (value > kMaxRepeatCount) Fail(Concat("the count is above ", kMaxRepeatCount));
  return value;
}

char32_t GrammarReader::Character() {
  if (AtEnd()) {
    Fail("the grammar ends inside a literal or class");
    return 0;
  }
  return NextCodePoint(text_, &pos_);
}

char32_t GrammarReader::Escape() {
  const char32_t c = Character();
  int digits = 0;
  switch (c) {
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    case 'f':
      return '\f';
    case 'v':
      return '\v';
    case 'x':
      digits = 2;
      break;
    case 'u':
      digits = 4;
      break;
    case 'U':
      digits = 8;
      break;
    default:
      if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) {
        Fail("unknown escape");
      }
      return c;
  }
  uint32_t value = 0;
  for (int i = 0; i < digits; ++i) {
    const int digit = HexDigit(Peek());
    if (digit < 0) {
      Fail("a hexadecimal digit is missing in an escape");
      return 0;
    }
    value = 16 * value + static_cast<uint32_t>(digit);
    ++pos_;
  }
  if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
    Fail("an escape does not stand for a character");
    return 0;
  }
  return value;
}

std::string GrammarReader::Literal(char quote) {
  std::string out;
  while (ok() && Peek() != quote) {
    if (Peek() == '\n') Fail("a literal has no closing quote");
    char32_t c = Character();
    if (c == '\\') c = Escape();
    if (ok()) AppendUtf8(c, &out);
  }
  Skip(1);
  return out;
}

CharSet GrammarReader::Class() {
  const bool negated = Accept("^");
  CharSet set;
  const auto one = [&] {
    const char32_t c = Character();
    return c == '\\' ? Escape() : c;
  };
  while (ok() && Peek() != ']') {
    const char32_t first = one();
    char32_t last = first;
    if (Peek() == '-' && Peek(1) != ']') {
      Skip(1);
      last = one();
      if (ok() && last < first) Fail("a range in a class is in the wrong order");
    }
    set.push_back({first, last});
  }
  Skip(1);
  set = Normalized(std::move(set));
  return negated ? Complement(set) : set;
}

void GrammarReader::Fail(std::string_view what) {
  if (!error_.empty()) return;
  error_ = what;
  error_pos_ = std::min(pos_, text_.size());
  pos_ = text_.size();
}

Status GrammarReader::status() const {
  if (ok()) return absl::OkStatus();
  const auto lines = std::count(text_.begin(), text_.begin() + error_pos_, '\n');
  return absl::InvalidArgumentError(Concat("grammar: line ", lines + 1, ": ", error_));
}

GrammarExprPtr MakeExpr(GrammarExpr::Kind kind) {
  auto expr = std::make_unique<GrammarExpr>();
  expr->kind = kind;
  return expr;
}

GrammarExprPtr MakePattern(std::unique_ptr<PatternNode> pattern) {
  GrammarExprPtr expr = MakeExpr(GrammarExpr::Kind::kPattern);
  expr->pattern = std::move(pattern);
  return expr;
}

GrammarExprPtr MakeText(std::string_view text, bool ignore_case) {
  auto sequence = std::make_unique<PatternNode>();
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = NextCodePoint(text, &pos);
    auto set = std::make_unique<PatternNode>();
    set->kind = PatternNode::Kind::kSet;
    set->set = {{c, c}};
    if (ignore_case) set->set = WithBothCases(set->set);
    sequence->children.push_back(std::move(set));
  }
  return MakePattern(std::move(sequence));
}

GrammarExprPtr MakeRepeat(GrammarExprPtr child, int min, int max) {
  GrammarExprPtr expr = MakeExpr(GrammarExpr::Kind::kRepeat);
  expr->children.push_back(std::move(child));
  expr->min = min;
  expr->max = max;
  return expr;
}

std::unique_ptr<PatternNode> Copy(const PatternNode& node) {
  auto out = std::make_unique<PatternNode>();
  out->kind = node.kind;
  out->set = node.set;
  out->min = node.min;
  out->max = node.max;
  for (const auto& child : node.children) out->children.push_back(Copy(*child));
  return out;
}

}  // namespace moeserve::structured

#include "engine/text/structured/automata/pattern_syntax.h"

#include <optional>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

using NodePtr = std::unique_ptr<PatternNode>;
using PatternKind = PatternNode::Kind;

constexpr int kMaxGroupDepth = 64;
// Larger repetition counts would exceed the limit on states.
constexpr int kMaxCount = 100000;

const CharSet kDigits = {{'0', '9'}};
const CharSet kWordCharacters = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CharSet kWhiteSpace = {{0x09, 0x0D},     {0x20, 0x20},     {0xA0, 0xA0},     {0x1680, 0x1680},
                             {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                             {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CharSet kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

NodePtr MakeNode(PatternKind kind) {
  auto node = std::make_unique<PatternNode>();
  node->kind = kind;
  return node;
}

bool IsDigit(char32_t c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  explicit Parser(std::string_view pattern) {
    for (size_t pos = 0; pos < pattern.size();) text_.push_back(NextCodePoint(pattern, &pos));
  }

  Result<NodePtr> Run() {
    ignore_case_ = Accept("(?i)");
    NodePtr node = Alternatives(0);
    if (error_.empty() && !AtEnd()) Fail("unmatched ')'");
    if (error_.empty()) return node;
    return absl::InvalidArgumentError(
        Concat(error_, " at character ", error_pos_ + 1, " of the pattern"));
  }

 private:
  bool AtEnd() const { return pos_ >= text_.size(); }
  char32_t Peek(size_t ahead = 0) const {
    return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : 0;
  }
  bool LooksAt(std::string_view ascii) const {
    if (text_.size() - pos_ < ascii.size()) return false;
    for (size_t i = 0; i < ascii.size(); ++i) {
      if (text_[pos_ + i] != static_cast<unsigned char>(ascii[i])) return false;
    }
    return true;
  }
  bool Accept(std::string_view ascii) {
    if (!LooksAt(ascii)) return false;
    pos_ += ascii.size();
    return true;
  }
  void Fail(std::string_view what) {
    if (!error_.empty()) return;
    error_ = what;
    error_pos_ = pos_;
  }
  bool ok() const { return error_.empty(); }

  NodePtr Alternatives(int depth) {
    NodePtr out = MakeNode(PatternKind::kAlternatives);
    if (depth > kMaxGroupDepth) {
      Fail("groups are nested too deep");
      return out;
    }
    do {
      NodePtr sequence = MakeNode(PatternKind::kSequence);
      while (ok() && !AtEnd() && Peek() != '|' && Peek() != ')') {
        sequence->children.push_back(Repeated(depth));
      }
      out->children.push_back(std::move(sequence));
    } while (ok() && Accept("|"));
    return out;
  }

  NodePtr Repeated(int depth) {
    NodePtr atom = Atom(depth);
    if (!ok()) return atom;
    int min = 0;
    int max = PatternNode::kUnbounded;
    if (Accept("*")) {
    } else if (Accept("+")) {
      min = 1;
    } else if (Accept("?")) {
      max = 1;
    } else if (!Braces(&min, &max)) {
      return atom;
    }
    if (!ok()) return atom;
    if (atom->kind == PatternKind::kAtStart || atom->kind == PatternKind::kAtEnd) {
      Fail("repetition of an anchor");
      return atom;
    }
    Accept("?");  // lazy and greedy repetition match the same texts
    if (Peek() == '+') Fail("possessive repetition is not supported");
    if (Peek() == '*' || Peek() == '?') Fail("repetition of a repetition");
    NodePtr out = MakeNode(PatternKind::kRepeat);
    out->min = min;
    out->max = max;
    out->children.push_back(std::move(atom));
    return out;
  }

  std::optional<int> Count(size_t* ahead) const {
    if (!IsDigit(Peek(*ahead))) return std::nullopt;
    int value = 0;
    for (; IsDigit(Peek(*ahead)); ++*ahead) {
      if (value <= kMaxCount) value = value * 10 + static_cast<int>(Peek(*ahead) - '0');
    }
    return value;
  }

  // Reads {n}, {n,} or {n,m}. Returns false, without reading anything, if the braces are ordinary
  // characters.
  bool Braces(int* min, int* max) {
    if (Peek() != '{') return false;
    size_t ahead = 1;
    const std::optional<int> first = Count(&ahead);
    if (!first) {
      if (Peek(ahead) == ',' && (IsDigit(Peek(ahead + 1)) || Peek(ahead + 1) == '}')) {
        Fail("a repetition needs its lower bound");
      }
      return false;
    }
    *min = *first;
    *max = *first;
    if (Peek(ahead) == ',') {
      ++ahead;
      *max = Count(&ahead).value_or(PatternNode::kUnbounded);
    }
    if (Peek(ahead) != '}') return false;
    if (*min > kMaxCount || *max > kMaxCount) Fail("too large a repetition");
    if (*max != PatternNode::kUnbounded && *min > *max) Fail("repetition bounds out of order");
    pos_ += ahead + 1;
    return true;
  }

  NodePtr SetNode(CharSet set) {
    NodePtr node = MakeNode(PatternKind::kSet);
    node->set = ignore_case_ ? WithBothCases(set) : std::move(set);
    return node;
  }
  NodePtr LiteralNode(char32_t c) {
    if (ignore_case_ && c >= 0x80) Fail("a non-ASCII character where case is ignored");
    return SetNode({{c, c}});
  }

  NodePtr Atom(int depth) {
    const char32_t c = Peek();
    switch (c) {
      case '(':
        return Group(depth);
      case '[':
        return Class();
      case '.':
        ++pos_;
        return SetNode(Complement(kLineEnds));
      case '^':
        ++pos_;
        return MakeNode(PatternKind::kAtStart);
      case '$':
        ++pos_;
        return MakeNode(PatternKind::kAtEnd);
      case '\\':
        return Escape();
      case '*':
      case '+':
      case '?':
        Fail("repetition of nothing");
        return nullptr;
      default: {
        int min, max;
        if (c == '{' && Braces(&min, &max) && ok()) Fail("repetition of nothing");
        if (!ok()) return nullptr;
        NodePtr node = LiteralNode(c);
        ++pos_;
        return node;
      }
    }
  }

  NodePtr Group(int depth) {
    if (LooksAt("(?=") || LooksAt("(?!") || LooksAt("(?<=") || LooksAt("(?<!")) {
      Fail("look-around is not supported");
      return nullptr;
    }
    if (LooksAt("(?P=") || LooksAt("(?(")) {
      Fail("back-references are not supported");
      return nullptr;
    }
    if (Accept("(?:")) {
    } else if (Accept("(?<") || Accept("(?P<")) {
      const size_t name = pos_;
      while (!AtEnd() && Peek() != '>' && Peek() != ')') ++pos_;
      if (pos_ == name || !Accept(">")) Fail("a group's name is wrong");
    } else if (LooksAt("(?")) {
      Fail("this kind of group is not supported");
    } else {
      ++pos_;
    }
    if (!ok()) return nullptr;
    NodePtr node = Alternatives(depth + 1);
    if (ok() && !Accept(")")) Fail("missing ')'");
    return node;
  }

  // Reads a number of `digits` hexadecimal digits.
  std::optional<char32_t> Hex(int digits) {
    char32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      const int digit = HexDigit(Peek(i));
      if (digit < 0) return std::nullopt;
      value = value * 16 + static_cast<char32_t>(digit);
    }
    pos_ += digits;
    return value;
  }

  // Reads the rest of an escape after \u.
  std::optional<char32_t> UnicodeEscape() {
    if (Accept("{")) {
      char32_t value = 0;
      int digits = 0;
      for (; HexDigit(Peek()) >= 0 && digits < 8; ++digits, ++pos_) {
        value = value * 16 + static_cast<char32_t>(HexDigit(Peek()));
      }
      if (digits == 0 || value > 0x10FFFF || !Accept("}")) return std::nullopt;
      return value;
    }
    const std::optional<char32_t> first = Hex(4);
    if (!first || *first < 0xD800 || *first > 0xDBFF) return first;
    if (!Accept("\\u")) return std::nullopt;
    const std::optional<char32_t> second = Hex(4);
    if (!second || *second < 0xDC00 || *second > 0xDFFF) return std::nullopt;
    return 0x10000 + ((*first - 0xD800) << 10) + (*second - 0xDC00);
  }

  // Returns the set of characters that a letter after a backslash stands for; nullopt if it is no
  // class escape.
  static std::optional<CharSet> ClassEscape(char32_t letter) {
    switch (letter) {
      case 'd':
        return kDigits;
      case 'D':
        return Complement(kDigits);
      case 'w':
        return kWordCharacters;
      case 'W':
        return Complement(kWordCharacters);
      case 's':
        return kWhiteSpace;
      case 'S':
        return Complement(kWhiteSpace);
      default:
        return std::nullopt;
    }
  }

  static std::optional<char32_t> ControlEscape(char32_t letter) {
    switch (letter) {
      case 't':
        return '\t';
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      default:
        return std::nullopt;
    }
  }

  // Returns why an escape is rejected; empty if it is not rejected.
  static std::string_view Refusal(char32_t c) {
    switch (c) {
      case 'b':
      case 'B':
        return "word boundaries are not supported";
      case 'p':
      case 'P':
        return "Unicode properties are not supported";
      case 'A':
      case 'Z':
      case 'z':
        return "use ^ and $ for the ends of the text";
      default:
        if (c == 'k' || (c >= '1' && c <= '9')) return "back-references are not supported";
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return "unknown escape";
        return "";
    }
  }

  // Reads a backslash sequence. Returns its character; if the sequence stands for a set of
  // characters, sets `*set` instead.
  std::optional<char32_t> EscapedCharacter(bool in_class, std::optional<CharSet>* set) {
    const size_t at = pos_;
    ++pos_;
    if (AtEnd()) {
      Fail("backslash at the end");
      return std::nullopt;
    }
    const char32_t c = Peek();
    ++pos_;
    const auto fail = [&](std::string_view what) {
      pos_ = at;
      Fail(what);
      return std::nullopt;
    };
    if ((*set = ClassEscape(c))) return std::nullopt;
    if (const std::optional<char32_t> control = ControlEscape(c)) return control;
    if (c == 'b' && in_class) return '\b';
    if (c == '0') {
      if (IsDigit(Peek())) return fail("octal escapes are not supported");
      return U'\0';
    }
    if (c == 'x') {
      const std::optional<char32_t> value = Hex(2);
      if (!value) return fail("\\x needs two hexadecimal digits");
      return value;
    }
    if (c == 'u') {
      const std::optional<char32_t> value = UnicodeEscape();
      if (!value || (*value >= 0xD800 && *value <= 0xDFFF)) {
        return fail("\\u needs the four digits of a character");
      }
      return value;
    }
    if (const std::string_view refusal = Refusal(c); !refusal.empty()) return fail(refusal);
    return c;
  }

  NodePtr Escape() {
    std::optional<CharSet> set;
    const std::optional<char32_t> c = EscapedCharacter(/*in_class=*/false, &set);
    if (!ok()) return nullptr;
    return set ? SetNode(std::move(*set)) : LiteralNode(*c);
  }

  NodePtr Class() {
    const size_t open = pos_;
    ++pos_;
    const bool negated = Accept("^");
    if (Peek() == ']') {
      Fail("empty class");
      return nullptr;
    }
    CharSet items;
    // The members of \s and its like have no other case beyond ASCII, or have it among them.
    const auto add_named = [&](CodePointRange range) {
      if (ignore_case_ && range.last >= 0x80) Fail("a non-ASCII character where case is ignored");
      items.push_back(range);
    };
    while (ok() && !Accept("]")) {
      if (AtEnd()) {
        pos_ = open;
        Fail("missing ']'");
        return nullptr;
      }
      std::optional<CharSet> set;
      const std::optional<char32_t> first = ClassItem(&set);
      if (!ok()) return nullptr;
      const bool range = Peek() == '-' && pos_ + 1 < text_.size() && Peek(1) != ']';
      if (!range) {
        if (set) items.insert(items.end(), set->begin(), set->end());
        if (first) add_named({*first, *first});
        continue;
      }
      ++pos_;
      const std::optional<char32_t> last = set ? std::nullopt : ClassItem(&set);
      if (!ok()) return nullptr;
      if (set || *first > *last) {
        Fail("wrong range in a class");
        return nullptr;
      }
      add_named({*first, *last});
    }
    if (ignore_case_) items = WithBothCases(items);
    items = Normalized(std::move(items));
    if (negated) items = Complement(items);
    NodePtr node = MakeNode(PatternKind::kSet);
    node->set = std::move(items);
    return node;
  }

  std::optional<char32_t> ClassItem(std::optional<CharSet>* set) {
    if (Peek() == '\\') return EscapedCharacter(/*in_class=*/true, set);
    return text_[pos_++];
  }

  std::u32string text_;
  size_t pos_ = 0;
  bool ignore_case_ = false;
  std::string error_;
  size_t error_pos_ = 0;
};

}  // namespace

Result<NodePtr> ParsePattern(std::string_view pattern) {
  if (!IsValidUtf8(pattern)) return absl::InvalidArgumentError("the pattern is not UTF-8");
  return Parser(pattern).Run();
}

}  // namespace moeserve::structured

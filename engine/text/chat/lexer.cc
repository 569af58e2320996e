#include "engine/text/chat/lexer.h"

#include <algorithm>

#include "engine/text/chat/text.h"
#include "engine/text/chat/value.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

constexpr size_t kMaxNameBytes = 256;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsHexDigit(char c) { return IsDigit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool IsNameByte(char c) {
  return IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// Turns every line end into \n and drops one line end at the end of the template.
std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out.push_back('\n');
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out.push_back(source[i]);
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(NormalizeNewlines(source)) {}

  std::vector<Token> Run() {
    while (pos_ < source_.size()) ReadData();
    Add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void FailHere(std::string message) {
    throw TemplateError{std::move(message), false, Line(pos_)};
  }

  int Line(size_t pos) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<std::ptrdiff_t>(counted_),
                   source_.begin() + static_cast<std::ptrdiff_t>(std::max(pos, counted_)), '\n'));
    counted_ = std::max(pos, counted_);
    return line_;
  }

  void Add(TokenKind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), Line(pos_)});
  }

  bool At(std::string_view text) const { return source_.compare(pos_, text.size(), text) == 0; }
  bool At(size_t pos, std::string_view text) const {
    return source_.compare(pos, text.size(), text) == 0;
  }

  size_t SkipSpace(size_t pos) const {
    const std::string_view rest = std::string_view(source_).substr(pos);
    return pos + StripBounds(rest, nullptr, true, false).begin;
  }

  void ReadData() {
    size_t tag = pos_;
    for (; tag < source_.size(); ++tag) {
      tag = std::min(source_.find('{', tag), source_.size());
      if (tag + 1 < source_.size() &&
          (source_[tag + 1] == '%' || source_[tag + 1] == '{' || source_[tag + 1] == '#')) {
        break;
      }
    }
    tag = std::min(tag, source_.size());
    if (tag == source_.size()) {
      AddData(pos_, tag, '\0', false);
      pos_ = tag;
      return;
    }
    const char kind = source_[tag + 1];
    const char sign = SignAt(tag + 2);
    AddData(pos_, tag, sign, kind != '{');
    pos_ = tag;
    const size_t inside = tag + 2 + (sign == '\0' ? 0 : 1);
    if (kind == '#') {
      SkipComment(inside);
    } else if (kind == '{') {
      Add(TokenKind::kPrintBegin, "");
      pos_ = inside;
      ReadTag("}}");
    } else if (const size_t body = RawTag(inside, "raw"); body != 0) {
      ReadRaw(body);
    } else {
      Add(TokenKind::kBlockBegin, "");
      pos_ = inside;
      ReadTag("%}");
    }
  }

  char SignAt(size_t pos) const {
    if (pos >= source_.size()) return '\0';
    return source_[pos] == '-' || source_[pos] == '+' ? source_[pos] : '\0';
  }

  // Adds the text before a tag. `sign` is the '-' or '+' at the tag's start, or 0.
  void AddData(size_t begin, size_t end, char sign, bool may_strip_line) {
    if (sign == '-') {
      end = begin +
            StripBounds(std::string_view(source_).substr(begin, end - begin), nullptr, false, true)
                .end;
    } else if (sign != '+' && may_strip_line) {
      const size_t newline = std::string_view(source_).substr(begin, end - begin).rfind('\n');
      const bool in_text = newline != std::string::npos;
      const size_t line = in_text ? begin + newline + 1 : begin;
      if (in_text || at_line_start_) {
        const std::string_view last = std::string_view(source_).substr(line, end - line);
        if (StripBounds(last, nullptr, true, false).begin == last.size()) end = line;
      }
    }
    if (begin < end) Add(TokenKind::kData, source_.substr(begin, end - begin));
  }

  // Continues after a tag that ended at `end`. `sign` is the '-' or '+' at the tag's end, or 0;
  // `newline` is whether a line end after the tag is removed.
  void AfterTag(size_t end, char sign, bool newline) {
    if (sign == '-') {
      end = SkipSpace(end);
    } else if (sign != '+' && newline && end < source_.size() && source_[end] == '\n') {
      ++end;
    }
    pos_ = end;
    at_line_start_ = source_[end - 1] == '\n';
  }

  void SkipComment(size_t inside) {
    const size_t end = source_.find("#}", inside);
    if (end == std::string::npos) FailHere("a comment has no end");
    AfterTag(end + 2, end > inside ? SignAt(end - 1) : '\0', true);
  }

  // `inside` is the position after a {%. If the tag there is {% raw %} (or {% endraw %}, as `word`
  // says), returns the position after the tag; otherwise 0.
  size_t RawTag(size_t inside, std::string_view word) const {
    size_t pos = SkipSpace(inside);
    if (!At(pos, word)) return 0;
    pos = SkipSpace(pos + word.size());
    if (At(pos, "-%}")) return SkipSpace(pos + 3);
    return At(pos, "%}") ? pos + 2 : 0;
  }

  void ReadRaw(size_t body) {
    pos_ = body;
    at_line_start_ = source_[body - 1] == '\n';
    for (size_t tag = source_.find("{%", body); tag != std::string::npos;
         tag = source_.find("{%", tag + 1)) {
      const char sign = SignAt(tag + 2);
      size_t pos = SkipSpace(tag + 2 + (sign == '\0' ? 0 : 1));
      if (!At(pos, "endraw")) continue;
      pos = SkipSpace(pos + 6);
      const char end_sign = SignAt(pos);
      if (end_sign != '\0') ++pos;
      if (!At(pos, "%}")) continue;
      AddData(body, tag, sign, true);
      AfterTag(pos + 2, end_sign, true);
      return;
    }
    FailHere("{% raw %} has no end");
  }

  // Reads the tokens of one tag, up to and including its end mark `end`.
  void ReadTag(std::string_view end) {
    const bool is_block = end == "%}";
    std::string open;  // the brackets that are open
    while (true) {
      if (pos_ >= source_.size()) FailHere("a tag has no end");
      if (open.empty()) {
        const char sign = At(pos_ + 1, end) ? SignAt(pos_) : '\0';
        if (At(end) || sign == '-' || (sign == '+' && is_block)) {
          Add(is_block ? TokenKind::kBlockEnd : TokenKind::kPrintEnd, "");
          AfterTag(pos_ + end.size() + (sign == '\0' ? 0 : 1), sign, is_block);
          return;
        }
      }
      if (const size_t next = SkipSpace(pos_); next != pos_) {
        pos_ = next;
        continue;
      }
      const char c = source_[pos_];
      if (IsDigit(c)) {
        ReadNumber();
      } else if (IsNameByte(c)) {
        const size_t begin = pos_;
        size_t p = begin;
        while (p < source_.size() && IsNameByte(source_[p])) ++p;
        // Each scope of a loop copies the names of its variables.
        if (p - begin > kMaxNameBytes) FailHere("a name is too long");
        Add(TokenKind::kName, source_.substr(begin, p - begin));
        pos_ = p;
      } else if (c == '\'' || c == '"') {
        ReadString(c);
      } else {
        ReadOperator(open);
      }
    }
  }

  void ReadOperator(std::string& open) {
    for (const std::string_view op : {"//", "**", "==", "!=", ">=", "<="}) {
      if (!At(op)) continue;
      Add(TokenKind::kOperator, std::string(op));
      pos_ += 2;
      return;
    }
    const char c = source_[pos_];
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      FailHere("unexpected character '" + std::string(1, c) + "'");
    }
    if (c == '(' || c == '[' || c == '{') {
      open.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    } else if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != c) FailHere("unexpected '" + std::string(1, c) + "'");
      open.pop_back();
    }
    Add(TokenKind::kOperator, std::string(1, c));
    ++pos_;
  }

  // Returns the position after the digits at `pos`, which may have single underscores between them.
  size_t SkipDigits(size_t pos, bool (*is_digit)(char)) const {
    while (pos < source_.size() &&
           (is_digit(source_[pos]) ||
            (source_[pos] == '_' && pos + 1 < source_.size() && is_digit(source_[pos + 1])))) {
      ++pos;
    }
    return pos;
  }

  void ReadNumber() {
    const size_t begin = pos_;
    size_t end = begin;
    TokenKind kind = TokenKind::kInteger;
    const char second = begin + 1 < source_.size() ? source_[begin + 1] | 0x20 : '\0';
    if (source_[begin] == '0' && (second == 'x' || second == 'o' || second == 'b') &&
        begin + 2 < source_.size() && IsHexDigit(source_[begin + 2])) {
      end = SkipDigits(begin + 2, IsHexDigit);
    } else {
      end = SkipDigits(begin, IsDigit);
      const bool after_dot = begin > 0 && source_[begin - 1] == '.';
      const auto digit_at = [&](size_t p) { return p < source_.size() && IsDigit(source_[p]); };
      if (!after_dot && At(end, ".") && digit_at(end + 1)) {
        kind = TokenKind::kFloat;
        end = SkipDigits(end + 1, IsDigit);
      }
      if (!after_dot && end < source_.size() && (source_[end] | 0x20) == 'e') {
        const size_t exponent = end + 1 + (SignAt(end + 1) == '\0' ? 0 : 1);
        if (digit_at(exponent)) {
          kind = TokenKind::kFloat;
          end = SkipDigits(exponent, IsDigit);
        }
      }
    }
    std::string text = source_.substr(begin, end - begin);
    std::erase(text, '_');
    Add(kind, std::move(text));
    pos_ = end;
  }

  void ReadString(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) FailHere("a string has no end");
    Add(TokenKind::kString, Unescape(std::string_view(source_).substr(pos_ + 1, end - pos_ - 1)));
    pos_ = end + 1;
  }

  std::string Unescape(std::string_view text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\') {
        out.push_back(text[i]);
        continue;
      }
      const char c = text[++i];
      constexpr std::string_view kFrom = "\\'\"abfnrtv";
      constexpr std::string_view kTo = "\\'\"\a\b\f\n\r\t\v";
      if (const size_t at = kFrom.find(c); at != std::string_view::npos) {
        out.push_back(kTo[at]);
      } else if (c >= '0' && c <= '7') {
        char32_t value = 0;
        size_t digits = 0;
        for (; digits < 3 && i < text.size() && text[i] >= '0' && text[i] <= '7'; ++digits, ++i) {
          value = value * 8 + static_cast<char32_t>(text[i] - '0');
        }
        --i;
        AppendUtf8(value, &out);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        AppendUtf8(HexValue(text.substr(i + 1, digits), digits), &out);
        i += digits;
      } else if (c == 'N') {
        FailHere("\\N{...} is not supported in strings");
      } else if (c != '\n') {
        out.push_back('\\');
        out.push_back(c);
      }
    }
    return out;
  }

  char32_t HexValue(std::string_view digits, size_t size) {
    if (digits.size() != size || !std::all_of(digits.begin(), digits.end(), IsHexDigit)) {
      FailHere("a character escape in a string has too few digits");
    }
    const unsigned long value = std::stoul(std::string(digits), nullptr, 16);
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
      FailHere("a character escape in a string is no Unicode character");
    }
    return static_cast<char32_t>(value);
  }

  const std::string source_;
  size_t pos_ = 0;
  size_t counted_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> Tokenize(std::string_view source) { return Lexer(source).Run(); }

}  // namespace moeserve::chat

#include "engine/text/tokenizer/regex_syntax.h"

#include <cstdint>
#include <cstdio>
#include <optional>
#include <vector>

#include "base/error_text.h"
#include "engine/text/tokenizer/unicode/unicode_tables.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// Limits the recursion; real patterns nest two or three groups deep.
constexpr int kMaxGroupDepth = 32;

constexpr CodePointRange kWhiteSpace[] = {
    {0x09, 0x0D},     {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
    {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};

struct PropertyName {
  std::string_view name;
  std::string_view category;
};
// Mn, Cn and C are missing because they cannot be translated: PCRE2's older Unicode version
// contains code points in these categories that Unicode 16 does not, and a class cannot subtract
// them.
constexpr PropertyName kProperties[] = {
    {"l", "L"},   {"letter", "L"},
    {"lu", "Lu"}, {"uppercaseletter", "Lu"},
    {"ll", "Ll"}, {"lowercaseletter", "Ll"},
    {"lt", "Lt"}, {"titlecaseletter", "Lt"},
    {"lm", "Lm"}, {"modifierletter", "Lm"},
    {"lo", "Lo"}, {"otherletter", "Lo"},
    {"m", "M"},   {"mark", "M"},
    {"mc", "Mc"}, {"spacingmark", "Mc"},
    {"me", "Me"}, {"enclosingmark", "Me"},
    {"n", "N"},   {"number", "N"},
    {"nd", "Nd"}, {"decimalnumber", "Nd"},
    {"nl", "Nl"}, {"letternumber", "Nl"},
    {"no", "No"}, {"othernumber", "No"},
    {"p", "P"},   {"punctuation", "P"},
    {"pc", "Pc"}, {"connectorpunctuation", "Pc"},
    {"pd", "Pd"}, {"dashpunctuation", "Pd"},
    {"ps", "Ps"}, {"openpunctuation", "Ps"},
    {"pe", "Pe"}, {"closepunctuation", "Pe"},
    {"pi", "Pi"}, {"initialpunctuation", "Pi"},
    {"pf", "Pf"}, {"finalpunctuation", "Pf"},
    {"po", "Po"}, {"otherpunctuation", "Po"},
    {"s", "S"},   {"symbol", "S"},
    {"sm", "Sm"}, {"mathsymbol", "Sm"},
    {"sc", "Sc"}, {"currencysymbol", "Sc"},
    {"sk", "Sk"}, {"modifiersymbol", "Sk"},
    {"so", "So"}, {"othersymbol", "So"},
    {"z", "Z"},   {"separator", "Z"},
    {"zs", "Zs"}, {"spaceseparator", "Zs"},
    {"zl", "Zl"}, {"lineseparator", "Zl"},
    {"zp", "Zp"}, {"paragraphseparator", "Zp"},
};

std::string CodePointText(char32_t c) {
  if ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) {
    return std::string(1, static_cast<char>(c));
  }
  char buffer[16];
  std::snprintf(buffer, sizeof(buffer), "\\x{%X}", static_cast<unsigned>(c));
  return buffer;
}

std::string RangeText(char32_t first, char32_t last) {
  if (first == last) return CodePointText(first);
  return CodePointText(first) + "-" + CodePointText(last);
}

std::string InBrackets(std::string_view open, const std::string& items) {
  return std::string(open).append(items).append("]");
}

std::string WhiteSpaceItems() {
  std::string out;
  for (const CodePointRange& range : kWhiteSpace) out += RangeText(range.first, range.last);
  return out;
}

std::string NotWhiteSpaceItems() {
  std::string out;
  char32_t next = 0;
  for (const CodePointRange& range : kWhiteSpace) {
    out += RangeText(next, range.first - 1);
    next = range.last + 1;
  }
  // PCRE2 rejects surrogates as ends of a range, but not inside a range.
  return out + RangeText(next, 0x10FFFF);
}

// Returns the items of a bracket class for a general category: ASCII characters spelt out, because
// PCRE2 finds them by a table look-up but calls a function for a property; then the property; then
// the code points that later versions of Unicode added to the category.
std::string CategoryItems(std::string_view category) {
  std::string out;
  if (category == "L") out += "A-Za-z";
  if (category == "Lu") out += "A-Z";
  if (category == "Ll") out += "a-z";
  if (category == "N" || category == "Nd") out += "0-9";
  out.append("\\p{").append(category).append("}");
  char32_t first = 0;
  char32_t last = 0;
  for (const NewerRange& range : NewerRanges()) {
    if (!std::string_view(range.category).starts_with(category)) continue;
    if (last != 0 && range.first == last + 1) {
      last = range.last;
      continue;
    }
    if (last != 0) out += RangeText(first, last);
    first = range.first;
    last = range.last;
  }
  if (last != 0) out += RangeText(first, last);
  return out;
}

// Returns the items that \w matches both in Oniguruma and in Rust.
std::string CommonWordItems() {
  return CategoryItems("L") + CategoryItems("M") + CategoryItems("Nd") + CategoryItems("Nl") +
         CategoryItems("Pc") +
         "\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";
}

// Returns the items of Oniguruma's \w, which includes the Latin-1 superscripts and fractions
// outside brackets.
std::string OnigurumaWordItems(bool in_class) {
  std::string out = CommonWordItems();
  if (!in_class) out += "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}";
  return out;
}

bool IsAsciiAlnum(char32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

char32_t AsciiLower(char32_t c) { return c >= 'A' && c <= 'Z' ? c + 0x20 : c; }

// Returns whether the pair is the full case folding of one character (ß, ﬀ, ﬁ, ﬂ, ﬆ). If case is
// ignored, Oniguruma, unlike PCRE2, lets such a pair match that character.
bool FoldsTogether(char32_t a, char32_t b) {
  a = AsciiLower(a);
  b = AsciiLower(b);
  return (a == 's' && (b == 's' || b == 't')) || (a == 'f' && (b == 'f' || b == 'i' || b == 'l'));
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) {
    for (size_t pos = 0; pos < pattern.size();) pattern_.push_back(NextCodePoint(pattern, &pos));
  }

  absl::StatusOr<std::string> Run() {
    if (Accept("(?i)")) {
      out_ += "(?i)";
      ignore_case_ = true;
    }
    Alternatives(0);
    if (error_.empty() && pos_ < pattern_.size()) Fail("unmatched ')'");
    if (error_.empty()) return std::move(out_);
    return absl::InvalidArgumentError(
        Concat(error_, " at character ", pos_ + 1, " of the pattern"));
  }

 private:
  bool AtEnd() const { return pos_ >= pattern_.size(); }
  char32_t Peek(size_t ahead = 0) const {
    return pos_ + ahead < pattern_.size() ? pattern_[pos_ + ahead] : 0;
  }
  bool Accept(std::string_view ascii) {
    if (pattern_.size() - pos_ < ascii.size()) return false;
    for (size_t i = 0; i < ascii.size(); ++i) {
      if (pattern_[pos_ + i] != static_cast<char32_t>(ascii[i])) return false;
    }
    pos_ += ascii.size();
    return true;
  }
  void Fail(std::string_view what) {
    if (error_.empty()) error_ = what;
  }

  void Alternatives(int depth) {
    if (depth > kMaxGroupDepth) return Fail("groups nested too deep");
    previous_literal_ = 0;
    while (error_.empty() && !AtEnd() && Peek() != ')') {
      if (Accept("|")) {
        out_ += '|';
        previous_literal_ = 0;
        continue;
      }
      const bool repeatable = Atom(depth);
      if (error_.empty()) Quantifier(repeatable);
    }
  }

  // Translates one atom. Returns whether the atom may be repeated.
  bool Atom(int depth) {
    const char32_t literal_before = previous_literal_;
    previous_literal_ = 0;
    const char32_t c = Peek();
    switch (c) {
      case '(':
        return Group(depth);
      case '[':
        ++pos_;
        Class();
        return true;
      case '.':
        ++pos_;
        out_ += "[^\\n]";
        return true;
      case '^':
      case '$':
        ++pos_;
        out_ += static_cast<char>(c);
        return false;
      case '\\':
        return Escape(literal_before);
      case '*':
      case '+':
      case '?':
        Fail("repetition of nothing");
        return false;
      default:
        ++pos_;
        Literal(c, literal_before);
        return true;
    }
  }

  void Literal(char32_t c, char32_t literal_before) {
    if (ignore_case_) {
      if (c >= 0x80) return Fail("a non-ASCII character where case is ignored is not supported");
      if (FoldsTogether(literal_before, c)) {
        return Fail("letters with a joint case folding where case is ignored are not supported");
      }
    }
    previous_literal_ = c;
    out_ += CodePointText(c);
  }

  bool Group(int depth) {
    const bool outer_ignore_case = ignore_case_;
    bool repeatable = true;
    if (Accept("(?:")) {
      out_ += "(?:";
    } else if (Accept("(?i:")) {
      out_ += "(?i:";
      ignore_case_ = true;
    } else if (Accept("(?-i:")) {
      out_ += "(?-i:";
      ignore_case_ = false;
    } else if (Accept("(?>")) {
      out_ += "(?>";
    } else if (Accept("(?=") || Accept("(?!")) {
      out_ += pattern_[pos_ - 1] == '=' ? "(?=" : "(?!";
      repeatable = false;
    } else if (Accept("(?<=") || Accept("(?<!")) {
      out_ += pattern_[pos_ - 1] == '=' ? "(?<=" : "(?<!";
      repeatable = false;
    } else if (Peek(1) == '?') {
      Fail("this kind of group is not supported");
      return false;
    } else {
      ++pos_;
      out_ += "(?:";  // no capture is used
    }
    Alternatives(depth + 1);
    if (!Accept(")")) {
      Fail("missing ')'");
      return false;
    }
    out_ += ')';
    ignore_case_ = outer_ignore_case;
    previous_literal_ = 0;
    return repeatable;
  }

  bool Escape(char32_t literal_before) {
    if (pos_ + 1 >= pattern_.size()) {
      Fail("backslash at the end");
      return false;
    }
    const char32_t c = Peek(1);
    if (c == 'A' || c == 'z') {
      pos_ += 2;
      out_ += c == 'A' ? "\\A" : "\\z";
      return false;
    }
    if (const std::optional<std::string> items = SetEscape(/*in_class=*/false)) {
      out_ += *items;
    } else if (error_.empty()) {
      const char32_t literal = LiteralEscape();
      if (error_.empty()) Literal(literal, literal_before);
    }
    return true;
  }

  // Reads a backslash sequence that stands for a set of characters. Returns the set's items inside
  // brackets, or a whole class outside. If the sequence stands for a single character, returns
  // nullopt and consumes nothing.
  std::optional<std::string> SetEscape(bool in_class) {
    std::string items;
    bool negated = false;
    switch (Peek(1)) {
      case 's':
        items = WhiteSpaceItems();
        break;
      case 'S':
        pos_ += 2;
        return in_class ? NotWhiteSpaceItems() : InBrackets("[^", WhiteSpaceItems());
      case 'd':
      case 'D':
        items = CategoryItems("Nd");
        negated = Peek(1) == 'D';
        break;
      case 'w':
      case 'W':
        items = OnigurumaWordItems(in_class);
        negated = Peek(1) == 'W';
        break;
      case 'p':
      case 'P':
        return Property(in_class);
      default:
        return std::nullopt;
    }
    pos_ += 2;
    return Wrap(std::move(items), negated, in_class);
  }

  std::optional<std::string> Wrap(std::string items, bool negated, bool in_class) {
    if (ignore_case_) {
      Fail("a set where case is ignored is not supported");
      return std::nullopt;
    }
    if (!in_class) return InBrackets(negated ? "[^" : "[", items);
    if (!negated) return items;
    Fail("a negated set inside brackets is not supported");
    return std::nullopt;
  }

  std::optional<std::string> Property(bool in_class) {
    bool negated = Peek(1) == 'P';
    pos_ += 2;
    if (!Accept("{")) {
      Fail("\\p without braces is not supported");
      return std::nullopt;
    }
    if (Accept("^")) negated = !negated;
    std::string name;
    while (!AtEnd() && Peek() != '}') {
      const char32_t c = AsciiLower(Peek());
      ++pos_;
      if (c == ' ' || c == '_' || c == '-') continue;
      AppendUtf8(c, &name);
    }
    if (!Accept("}")) {
      Fail("missing '}'");
      return std::nullopt;
    }
    for (const PropertyName& property : kProperties) {
      if (property.name == name) return Wrap(CategoryItems(property.category), negated, in_class);
    }
    if (const auto ranges = ScriptRanges(name); !ranges.empty()) {
      std::string items;
      for (const CodePointRange& range : ranges) items += RangeText(range.first, range.last);
      return Wrap(std::move(items), negated, in_class);
    }
    Fail("property \\p{" + name + "} is not supported");
    return std::nullopt;
  }

  // Reads a backslash sequence and returns the character that it stands for.
  char32_t LiteralEscape() {
    const char32_t c = Peek(1);
    pos_ += 2;
    switch (c) {
      case 'n':
        return '\n';
      case 't':
        return '\t';
      case 'r':
        return '\r';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case 'a':
        return '\a';
      case 'e':
        return 0x1B;
      case 'u':
        return Hex(4, 4);
      case 'x':
        if (Accept("{")) {
          const char32_t value = Hex(1, 6);
          if (!Accept("}")) Fail("missing '}'");
          return value;
        }
        return AsciiOnly(Hex(1, 2));
      default:
        if (IsAsciiAlnum(c)) Fail("this backslash sequence is not supported");
        return c;
    }
  }

  // Rejects \x80 and above, which stand for bytes in Oniguruma, not for characters.
  char32_t AsciiOnly(char32_t c) {
    if (c >= 0x80) Fail("a byte above 0x7F is not supported");
    return c;
  }

  char32_t Hex(int min_digits, int max_digits) {
    char32_t value = 0;
    int digits = 0;
    for (; digits < max_digits && !AtEnd(); ++digits, ++pos_) {
      const char32_t c = AsciiLower(Peek());
      if (c >= '0' && c <= '9') {
        value = value * 16 + (c - '0');
      } else if (c >= 'a' && c <= 'f') {
        value = value * 16 + (c - 'a' + 10);
      } else {
        break;
      }
    }
    if (digits < min_digits || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
      Fail("a wrong hexadecimal character number");
      return 0;
    }
    return value;
  }

  void Class() {
    out_ += '[';
    if (Accept("^")) out_ += '^';
    if (Peek() == ']') return Fail("']' first inside brackets is not supported");
    while (true) {
      if (AtEnd()) return Fail("missing ']'");
      if (Accept("]")) break;
      if (Peek() == '[') return Fail("brackets inside brackets are not supported");
      if (Peek() == '&' && Peek(1) == '&') return Fail("'&&' inside brackets is not supported");
      if (Peek() == '\\') {
        if (const std::optional<std::string> items = SetEscape(/*in_class=*/true)) {
          out_ += *items;
          if (Peek() == '-' && Peek(1) != ']') return Fail("'-' after a set is not supported");
          continue;
        }
      }
      const char32_t first = ClassCharacter();
      if (!error_.empty()) return;
      char32_t last = first;
      if (Peek() == '-' && Peek(1) != ']' && pos_ + 1 < pattern_.size()) {
        ++pos_;
        if (Peek() == '[') return Fail("brackets inside brackets are not supported");
        last = ClassCharacter();
        if (!error_.empty()) return;
        if (last < first) return Fail("a range that runs backwards");
      }
      if (ignore_case_ && last >= 0x80) {
        return Fail("a non-ASCII character where case is ignored is not supported");
      }
      out_ += RangeText(first, last);
    }
    out_ += ']';
  }

  char32_t ClassCharacter() {
    if (Peek() != '\\') return pattern_[pos_++];
    if (pos_ + 1 >= pattern_.size()) {
      Fail("backslash at the end");
      return 0;
    }
    const char32_t c = Peek(1);
    // Rejects \b, which inside brackets is a backspace, and sets, which cannot end a range.
    if (c == 'b' || c == 's' || c == 'S' || c == 'd' || c == 'D' || c == 'w' || c == 'W' ||
        c == 'p' || c == 'P') {
      Fail("this backslash sequence is not supported here");
      return 0;
    }
    return LiteralEscape();
  }

  void Quantifier(bool repeatable) {
    bool interval = false;
    bool fixed_count = false;
    std::string text;
    if (Accept("*") || Accept("+") || Accept("?")) {
      text.push_back(static_cast<char>(pattern_[pos_ - 1]));
    } else if (Peek() == '{' && Interval(&text, &fixed_count)) {
      interval = true;
    } else {
      return;
    }
    if (!repeatable) return Fail("repetition of an assertion is not supported");
    out_ += text;
    previous_literal_ = 0;
    if (Accept("?")) {
      // Ruby reads x{2}? as (?:x{2})?, PCRE2 reads it as a lazy x{2}.
      if (fixed_count) return Fail("'?' after a fixed count is not supported");
      out_ += '?';
    } else if (Accept("+")) {
      // Ruby reads x{1,2}+ as (?:x{1,2})+, PCRE2 reads it as possessive.
      if (interval) return Fail("'+' after a count is not supported");
      out_ += '+';
    }
    std::string ignored;
    if (Peek() == '*' || Peek() == '+' || Peek() == '?' ||
        (Peek() == '{' && Interval(&ignored, &fixed_count))) {
      Fail("repetition of a repetition is not supported");
    }
  }

  // Reads {n} {n,} {n,m} or {,m}. Anything else in braces is literal text and is not consumed.
  bool Interval(std::string* text, bool* fixed_count) {
    size_t p = pos_ + 1;
    const auto number = [&]() {
      std::string digits;
      while (p < pattern_.size() && pattern_[p] >= '0' && pattern_[p] <= '9') {
        digits.push_back(static_cast<char>(pattern_[p++]));
      }
      return digits;
    };
    const auto at = [&](char32_t c) { return p < pattern_.size() && pattern_[p] == c; };
    const std::string low = number();
    std::string high;
    const bool comma = at(',');
    if (comma) {
      ++p;
      high = number();
    }
    if (!at('}') || (low.empty() && high.empty())) return false;
    pos_ = p + 1;
    if (low.size() > 4 || high.size() > 4) {
      Fail("a count above 9999 is not supported");
      return true;
    }
    if (!high.empty() && !low.empty() && std::stoi(low) > std::stoi(high)) {
      Fail("a count that runs backwards is not supported");
      return true;
    }
    *fixed_count = !comma;
    text->append("{").append(low.empty() ? "0" : low);
    if (comma) text->append(",").append(high);
    text->append("}");
    return true;
  }

  std::u32string pattern_;
  size_t pos_ = 0;
  std::string out_;
  std::string error_;
  bool ignore_case_ = false;
  // The literal before the current position for FoldsTogether(); 0 if there is none.
  char32_t previous_literal_ = 0;
};

}  // namespace

absl::StatusOr<std::string> TranslateRegex(std::string_view pattern) {
  // In a run of spaces that does not end a line, PCRE2 would scan the rest of the run from each
  // position. If the first attempt fails, all attempts in the run fail, so the run is skipped.
  if (pattern == "\\s+$") {
    const std::string space = InBrackets("[", WhiteSpaceItems());
    return space + "+$|" + space + "++(*SKIP)(*FAIL)";
  }
  return Translator(pattern).Run();
}

std::string LiteralRegex(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) out += CodePointText(NextCodePoint(text, &pos));
  return out;
}

std::string RustWordClass() { return InBrackets("[", CommonWordItems() + "\\x{200C}\\x{200D}"); }

std::string RustNumericClass() {
  return InBrackets("[", CategoryItems("N") + "\\x{11DE0}-\\x{11DE9}\\x{16FF4}-\\x{16FF6}");
}

bool IsWhiteSpace(char32_t code_point) {
  for (const CodePointRange& range : kWhiteSpace) {
    if (code_point >= range.first && code_point <= range.last) return true;
  }
  return false;
}

size_t SkipWhiteSpace(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    size_t pos = begin;
    if (!IsWhiteSpace(NextCodePoint(text, &pos))) break;
    begin = pos;
  }
  return begin;
}

size_t SkipWhiteSpaceBackwards(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t begin = CharacterBefore(text, end);
    size_t pos = begin;
    if (!IsWhiteSpace(NextCodePoint(text, &pos))) break;
    end = begin;
  }
  return end;
}

}  // namespace moeserve

// Reads the characters of a grammar. Used by the parsers of both notations.
#pragma once

#include <string>
#include <string_view>

#include "engine/text/structured/grammars/grammar_syntax.h"

namespace moeserve::structured {

// Largest nesting of groups; limits the use of the stack.
inline constexpr int kMaxGroupNesting = 64;
// Largest number of repetition marks behind one item, each of which nests it once more.
inline constexpr int kMaxRepetitions = 8;
// Larger repetition counts would exceed the limit on states.
inline constexpr int kMaxRepeatCount = 100000;

// Remembers the first error; after it, the text is at its end.
class GrammarReader {
 public:
  explicit GrammarReader(std::string_view text) : text_(text) {}

  bool AtEnd() const { return pos_ >= text_.size(); }
  char Peek(size_t ahead = 0) const {
    return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : '\0';
  }
  bool LooksAt(std::string_view text) const { return text_.substr(pos_).starts_with(text); }
  bool Accept(std::string_view text) {
    if (!LooksAt(text)) return false;
    pos_ += text.size();
    return true;
  }
  void Skip(size_t bytes) { pos_ = std::min(pos_ + bytes, text_.size()); }
  size_t pos() const { return pos_; }
  void set_pos(size_t pos) { pos_ = pos; }
  std::string_view Since(size_t begin) const { return text_.substr(begin, pos_ - begin); }

  // Skips white space, line ends and comments, which begin with `comment` or, if it is not empty,
  // `other_comment`.
  void SkipSpace(std::string_view comment, std::string_view other_comment = "");
  // Reads a name of letters, digits and the characters `more`; "" if there is none.
  std::string Name(std::string_view more);
  // Reads a number of at most kMaxRepeatCount.
  int Number();
  char32_t Character();
  // Reads what follows a backslash: an escape that stands for one character.
  char32_t Escape();
  // Reads a literal; the opening quote, which `quote` is, has been read.
  std::string Literal(char quote);
  // Reads a class; the opening bracket has been read.
  CharSet Class();

  void Fail(std::string_view what);
  bool ok() const { return error_.empty(); }
  // Returns InvalidArgument with the first error and its line.
  Status status() const;

 private:
  std::string_view text_;
  size_t pos_ = 0;
  std::string error_;
  size_t error_pos_ = 0;
};

}  // namespace moeserve::structured

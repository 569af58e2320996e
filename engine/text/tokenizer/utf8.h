// UTF-8: checking, stepping through code points, and putting characters together from bytes that
// arrive in parts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve {

// Well-formed by the Unicode standard: no overlong form, no surrogate, nothing above U+10FFFF.
bool IsValidUtf8(std::string_view text);

// The code point at `*pos`, which moves past it. `text` must be valid and `*pos` at a boundary.
char32_t NextCodePoint(std::string_view text, size_t* pos);

// `code_point` must be a Unicode scalar value.
void AppendUtf8(char32_t code_point, std::string* out);

// Turns a stream of bytes into valid UTF-8. Each longest start of a character that the next byte
// does not continue becomes one U+FFFD, as does each byte that starts nothing; this is the rule of
// the Unicode standard (section 3.9) and of Rust's lossy conversion.
class Utf8Assembler {
 public:
  // Appends every character that is complete; holds an unfinished one back.
  void Push(std::string_view bytes, std::string* out);
  // Appends U+FFFD when a character is unfinished, and starts anew.
  void Finish(std::string* out);

 private:
  char pending_[4];
  int pending_size_ = 0;
  int expected_size_ = 0;
};

}  // namespace moeserve

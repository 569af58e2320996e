// UTF-8: validation, iteration over code points, and assembly of characters from bytes that arrive
// in parts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve {

// Well-formed by the Unicode standard: no overlong form, no surrogate, nothing above U+10FFFF.
bool IsValidUtf8(std::string_view text);

// Returns the code point at `*pos` and advances `*pos`. `text` must be valid and `*pos` at a
// boundary.
char32_t NextCodePoint(std::string_view text, size_t* pos);

// `code_point` must be a Unicode scalar value.
void AppendUtf8(char32_t code_point, std::string* out);

// Turns a stream of bytes into valid UTF-8. Each maximal prefix of a character that the next byte
// does not continue becomes one U+FFFD, as does each byte that cannot start a character. This is
// the rule of the Unicode standard (section 3.9) and of Rust's lossy conversion.
class Utf8Assembler {
 public:
  // Appends every complete character and keeps the bytes of an unfinished one.
  void Push(std::string_view bytes, std::string* out);
  // Appends U+FFFD if a character is unfinished, and resets.
  void Finish(std::string* out);

 private:
  char pending_[4];
  int pending_size_ = 0;
  int expected_size_ = 0;
};

}  // namespace moeserve

// UTF-8: validation, iteration over code points, and assembly of characters from bytes that arrive
// in parts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve {

// Returns whether `text` is well-formed by the Unicode standard: no overlong form, no surrogate,
// nothing above U+10FFFF.
bool IsValidUtf8(std::string_view text);

// Returns the code point at `*pos` and advances `*pos` past it. `text` must be valid and `*pos` at
// the start of a character.
char32_t NextCodePoint(std::string_view text, size_t* pos);

// Returns the start of the character that ends at `end` > 0 in `text`, which must be valid.
inline size_t CharacterBefore(std::string_view text, size_t end) {
  --end;
  while (end > 0 && (text[end] & 0xC0) == 0x80) --end;
  return end;
}

// Returns the value of a hexadecimal digit, -1 for any other character.
constexpr int HexDigit(char32_t c) {
  if (c >= '0' && c <= '9') return static_cast<int>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<int>(c - 'a') + 10;
  if (c >= 'A' && c <= 'F') return static_cast<int>(c - 'A') + 10;
  return -1;
}

// Appends `code_point`, which must be a Unicode scalar value, as UTF-8.
void AppendUtf8(char32_t code_point, std::string* out);

// Turns a stream of bytes into valid UTF-8. Each maximal prefix of a character that the next byte
// does not continue becomes one U+FFFD, and so does each byte that cannot start a character. The
// Unicode standard (section 3.9) and Rust's lossy conversion use the same rule.
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

#include "engine/text/tokenizer/models/byte_level.h"

#include <array>

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

struct Alphabet {
  std::array<std::string, 256> char_of_byte;
  // The alphabet ends at U+0143: 188 bytes stand for the character of equal value, the other 68
  // bytes for characters from U+0100 on.
  std::array<int16_t, 0x144> byte_of_char;

  Alphabet() {
    byte_of_char.fill(-1);
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      const char32_t code_point = printable ? static_cast<char32_t>(byte) : next++;
      AppendUtf8(code_point, &char_of_byte[byte]);
      byte_of_char[code_point] = static_cast<int16_t>(byte);
    }
  }
};

const Alphabet& GetAlphabet() {
  static const Alphabet alphabet;
  return alphabet;
}

}  // namespace

std::string_view ByteLevelChar(uint8_t byte) { return GetAlphabet().char_of_byte[byte]; }

bool AppendByteLevelBytes(std::string_view token, std::string* bytes) {
  const Alphabet& alphabet = GetAlphabet();
  const size_t old_size = bytes->size();
  for (size_t pos = 0; pos < token.size();) {
    const char32_t code_point = NextCodePoint(token, &pos);
    const int byte =
        code_point < alphabet.byte_of_char.size() ? alphabet.byte_of_char[code_point] : -1;
    if (byte < 0) {
      bytes->resize(old_size);
      return false;
    }
    bytes->push_back(static_cast<char>(byte));
  }
  return true;
}

}  // namespace moeserve

#include "server/base/utf8.h"

#include "engine/text/tokenizer/utf8.h"

namespace moeserve::server {

std::string ReplaceInvalidUtf8(std::string_view bytes) {
  std::string out;
  Utf8Assembler assembler;
  assembler.Push(bytes, &out);
  assembler.Finish(&out);
  return out;
}

std::string Shortened(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)).append("...");
}

size_t CountCodePoints(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

}  // namespace moeserve::server

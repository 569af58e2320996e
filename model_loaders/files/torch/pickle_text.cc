#include "model_loaders/files/torch/pickle_text.h"

#include <charconv>
#include <cstdint>
#include <optional>

#include "base/error_text.h"

namespace moeserve {
namespace {

std::optional<uint32_t> HexNumber(std::string_view digits) {
  uint32_t number = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), number, 16);
  if (end != digits.data() + digits.size() || error != std::errc()) return std::nullopt;
  return number;
}

void AppendUtf8(uint32_t code, std::string* out) {
  const auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

}  // namespace

Result<std::string> UnquotePickleString(std::string_view line) {
  if (line.size() < 2 || line.front() != line.back() ||
      (line.front() != '\'' && line.front() != '"')) {
    return absl::InvalidArgumentError(Concat("expected a string in quotes, found ", Quoted(line)));
  }
  const std::string_view body = line.substr(1, line.size() - 2);
  std::string text;
  for (size_t i = 0; i < body.size(); ++i) {
    if (body[i] != '\\') {
      text.push_back(body[i]);
      continue;
    }
    const char escape = ++i < body.size() ? body[i] : '\0';
    if (escape == '\\' || escape == '\'' || escape == '"') {
      text.push_back(escape);
    } else if (escape == 'n' || escape == 'r' || escape == 't') {
      text.push_back(escape == 'n' ? '\n' : escape == 'r' ? '\r' : '\t');
    } else if (escape == 'x' && body.size() - i > 2 && HexNumber(body.substr(i + 1, 2))) {
      text.push_back(static_cast<char>(*HexNumber(body.substr(i + 1, 2))));
      i += 2;
    } else {
      return absl::InvalidArgumentError(
          Concat("expected an escape of Python's repr(), found ", Quoted(line)));
    }
  }
  return text;
}

Result<std::string> UnescapePickleUnicode(std::string_view line) {
  std::string text;
  for (size_t i = 0; i < line.size(); ++i) {
    const char kind = line[i] == '\\' && i + 1 < line.size() ? line[i + 1] : '\0';
    if (kind != 'u' && kind != 'U') {
      AppendUtf8(static_cast<unsigned char>(line[i]), &text);
      continue;
    }
    const size_t digits = kind == 'u' ? 4 : 8;
    const std::string_view number = line.substr(i + 2, digits);
    const std::optional<uint32_t> code = number.size() == digits ? HexNumber(number) : std::nullopt;
    if (!code.has_value() || *code > 0x10FFFF) {
      return absl::InvalidArgumentError(Concat(
          "expected the ", digits, " hexadecimal digits of a code point, found ", Quoted(number)));
    }
    AppendUtf8(*code, &text);
    i += 1 + digits;
  }
  return text;
}

}  // namespace moeserve

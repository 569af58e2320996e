// Splits template text into tokens, with the white space rules of Jinja's trim_blocks and
// lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moeserve::chat {

enum class TokenKind {
  kData,        // text outside tags
  kPrintBegin,  // {{
  kPrintEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,  // `text` is the string's value, without quotes and escapes
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;
  int line = 1;
};

// Splits `source`, which must be valid UTF-8. The last token is kEnd. Throws TemplateError with the
// line number.
std::vector<Token> Tokenize(std::string_view source);

}  // namespace moeserve::chat

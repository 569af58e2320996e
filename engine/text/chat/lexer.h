// Template text -> tokens, with the white space rules of trim_blocks and lstrip_blocks.
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
  kString,  // `text` is its value
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

// `source` must be valid UTF-8. Throws TemplateError with the line. Ends with a kEnd token.
std::vector<Token> Tokenize(std::string_view source);

}  // namespace moeserve::chat

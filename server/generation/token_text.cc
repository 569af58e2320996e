#include "server/generation/token_text.h"

#include "base/error_text.h"
#include "server/base/utf8.h"

namespace moeserve::server {

std::string TokenText(const Tokenizer* tokenizer, TokenId token, bool as_id) {
  if (as_id || tokenizer == nullptr) return Concat("token_id:", token);
  std::string bytes = tokenizer->TokenBytes(token);
  if (bytes.empty()) bytes = std::string(tokenizer->TokenString(token));
  return ReplaceInvalidUtf8(bytes);
}

}  // namespace moeserve::server

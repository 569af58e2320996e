// Tokens that stand for bytes.
#pragma once

#include <optional>
#include <string_view>

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {

// Returns the byte that a token such as <0x0A> stands for. As in Hugging Face's library, the first
// digit may be a plus sign, which no real token has.
inline std::optional<char> ByteOfToken(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return std::nullopt;
  const int high = token[3] == '+' ? 0 : HexDigit(token[3]);
  const int low = HexDigit(token[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<char>(high * 16 + low);
}

}  // namespace moeserve

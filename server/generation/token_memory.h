// The memory of what /tokenize, /detokenize and their calls over gRPC answer.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve::server {

// Returns an estimate of the memory of a list of token ids, with their spellings if `spelled`, as
// values and as text.
inline size_t TokenListBytes(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
                             bool spelled) {
  constexpr size_t kId = 32;
  constexpr size_t kSpelling = 96;
  size_t bytes = ids.size() * kId;
  if (!spelled) return bytes;
  for (const TokenId id : ids) bytes += kSpelling + 2 * tokenizer.TokenString(id).size();
  return bytes;
}

// Returns an estimate of the memory of the text of `ids`, as a value and as a part of the answer. A
// spelling has at least as many bytes as its text.
inline size_t DecodedBytes(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  size_t bytes = ids.size() * sizeof(TokenId);
  for (const TokenId id : ids) bytes += 3 * tokenizer.TokenString(id).size();
  return bytes;
}

}  // namespace moeserve::server

// The stage of a tokenizer that turns one piece of text into ids, such as byte-pair encoding.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/text/token_id.h"

namespace moeserve {

// Immutable after construction, for any number of threads.
class TokenModel {
 public:
  virtual ~TokenModel() = default;

  // Appends the ids of `piece`, valid UTF-8.
  virtual absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids) const = 0;

  virtual std::optional<TokenId> TokenToId(std::string_view token) const = 0;

  // The spelling in the vocabulary, nothing if `id` is no token of the model. Valid as long as the
  // model.
  virtual std::optional<std::string_view> TokenString(TokenId id) const = 0;

  // The number of tokens, and the largest id + 1.
  virtual int token_count() const = 0;
  virtual TokenId id_bound() const = 0;
};

}  // namespace moeserve

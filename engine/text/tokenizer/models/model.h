// The stage of a tokenizer that converts one piece of text to ids, such as byte-pair encoding.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/text/token_id.h"

namespace moeserve {

// Immutable after construction; any number of threads may use one object.
class TokenModel {
 public:
  virtual ~TokenModel() = default;

  // Appends the ids of `piece`, which must be valid UTF-8.
  virtual absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids) const = 0;

  virtual std::optional<TokenId> TokenToId(std::string_view token) const = 0;

  // Returns the token as the vocabulary spells it; nullopt if `id` is no token of the model. The
  // view is valid as long as the model.
  virtual std::optional<std::string_view> TokenString(TokenId id) const = 0;

  // token_count() is the number of tokens, id_bound() the largest id + 1.
  virtual int token_count() const = 0;
  virtual TokenId id_bound() const = 0;
};

}  // namespace moeserve

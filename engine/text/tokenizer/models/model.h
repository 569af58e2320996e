// The stage of a tokenizer that converts one piece of text to ids, such as byte-pair encoding.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/text/token_id.h"
#include "engine/text/tokenizer/models/vocabulary.h"
#include "engine/text/tokenizer/text_span.h"

namespace moeserve {

// Immutable after construction; any number of threads may use one object.
class TokenModel {
 public:
  virtual ~TokenModel() = default;

  // Appends the ids of `piece`, which must be valid UTF-8. Unless `spans` is null, also appends the
  // part of the piece that each id stands for; it may begin or end within a character.
  virtual absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                std::vector<TextSpan>* spans = nullptr) const = 0;

  std::optional<TokenId> TokenToId(std::string_view token) const { return vocab_.Find(token); }

  // Returns the token as the vocabulary spells it; nullopt if `id` is no token of the model. The
  // view is valid as long as the model.
  std::optional<std::string_view> TokenString(TokenId id) const { return vocab_.Token(id); }

  // token_count() is the number of tokens, id_bound() the largest id + 1.
  int token_count() const { return vocab_.count(); }
  TokenId id_bound() const { return vocab_.id_bound(); }

 protected:
  TokenModel() = default;

  Vocabulary vocab_;
};

}  // namespace moeserve

// The tokens of a model with their ids.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/token_id.h"
#include "engine/text/tokenizer/string_map.h"

namespace moeserve {

// Immutable after construction; any number of threads may use one object.
class Vocabulary {
 public:
  // Limits the size of tables that are indexed by id.
  static constexpr TokenId kMaxId = (1 << 22) - 1;

  // An empty vocabulary.
  Vocabulary() = default;
  // Movable only, because the keys of the map point into the strings.
  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;

  // InvalidArgument if an id is out of range or used twice, or if a token is listed twice or is not
  // UTF-8.
  static absl::StatusOr<Vocabulary> Create(std::vector<std::pair<std::string, TokenId>> tokens);

  std::optional<TokenId> Find(std::string_view token) const;
  // Returns nullopt if no token has this id. The view is valid as long as the vocabulary.
  std::optional<std::string_view> Token(TokenId id) const;

  int count() const { return static_cast<int>(ids_.size()); }
  // The largest id + 1.
  TokenId id_bound() const { return static_cast<TokenId>(strings_.size()); }

 private:
  std::vector<std::optional<std::string>> strings_;  // by id
  StringMap<TokenId> ids_;                           // keys point into strings_
};

// Returns the ids of the tokens <0x00> to <0xFF>, or -1.
std::array<TokenId, 256> ByteTokens(const Vocabulary& vocab);

}  // namespace moeserve

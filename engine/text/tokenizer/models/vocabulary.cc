#include "engine/text/tokenizer/models/vocabulary.h"

#include <algorithm>
#include <cstdio>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {

absl::StatusOr<Vocabulary> Vocabulary::Create(std::vector<std::pair<std::string, TokenId>> tokens) {
  Vocabulary vocabulary;
  TokenId bound = 0;
  for (const auto& [token, id] : tokens) {
    if (id < 0 || id > kMaxId) {
      return absl::InvalidArgumentError(Concat(
          "vocab: token ", Quoted(token), ": expected an id from 0 to ", kMaxId, ", found ", id));
    }
    if (!IsValidUtf8(token)) return absl::InvalidArgumentError("vocab: a token is not UTF-8");
    bound = std::max(bound, id + 1);
  }
  vocabulary.strings_.resize(bound);
  vocabulary.ids_.reserve(tokens.size());
  for (auto& [token, id] : tokens) {
    std::optional<std::string>& slot = vocabulary.strings_[id];
    if (slot.has_value()) {
      return absl::InvalidArgumentError(
          Concat("vocab: id ", id, " belongs to both ", Quoted(*slot), " and ", Quoted(token)));
    }
    slot = std::move(token);
    if (!vocabulary.ids_.emplace(*slot, id).second) {
      return absl::InvalidArgumentError(Concat("vocab: token ", Quoted(*slot), " is listed twice"));
    }
  }
  return vocabulary;
}

std::optional<TokenId> Vocabulary::Find(std::string_view token) const {
  const auto it = ids_.find(token);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

std::optional<std::string_view> Vocabulary::Token(TokenId id) const {
  if (id < 0 || id >= id_bound() || !strings_[id].has_value()) return std::nullopt;
  return *strings_[id];
}

std::array<TokenId, 256> ByteTokens(const Vocabulary& vocab) {
  std::array<TokenId, 256> ids;
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    ids[byte] = vocab.Find(name).value_or(-1);
  }
  return ids;
}

}  // namespace moeserve

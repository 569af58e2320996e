// SentencePiece's normalization, with the results of its program spm_normalize.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/tokenizer/models/prefix_trie.h"
#include "engine/text/tokenizer/normalizers/character_map.h"
#include "engine/text/tokenizer/normalizers/normalizer.h"

namespace moeserve {

struct SentencePieceRules {
  std::optional<CharacterMap> characters;
  bool add_dummy_prefix = true;             // puts a space in front of the text
  bool remove_extra_whitespaces = true;     // at both ends, and all but one of a run
  bool escape_whitespaces = true;           // writes "▁" for a space
  bool treat_whitespace_as_suffix = false;  // the dummy prefix comes after the text
};

class SentencePieceNormalizer : public Normalizer {
 public:
  // Texts in `user_defined`, which are not kept, stay as they are.
  SentencePieceNormalizer(SentencePieceRules rules,
                          std::vector<std::pair<std::string_view, TokenId>> user_defined)
      : rules_(std::move(rules)), user_defined_(std::move(user_defined)) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view) const override { return false; }

 private:
  // Returns the normal form of a prefix of `text`, which must not be empty, and its size.
  std::pair<std::string_view, size_t> Prefix(std::string_view text) const;

  SentencePieceRules rules_;
  PrefixTrie user_defined_;
};

}  // namespace moeserve

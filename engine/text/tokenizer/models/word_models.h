// Models that tokenize one word at a time: WordPiece, which cuts a word into the longest tokens
// from left to right, and WordLevel, which looks up whole words. The results are those of Hugging
// Face's library.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/models/model.h"
#include "engine/text/tokenizer/models/prefix_trie.h"

namespace moeserve {

struct WordPieceConfig {
  std::vector<std::pair<std::string, TokenId>> vocab;
  // Stands for a word that cannot be cut into tokens. If the vocabulary lacks it, a text with such
  // a word cannot be encoded.
  std::string unk_token;
  // In front of tokens that continue a word.
  std::string continuing_subword_prefix = "##";
  // A word with more characters is unknown.
  size_t max_input_chars_per_word = 100;
};

class WordPieceModel : public TokenModel {
 public:
  // Limits the work per byte of text.
  static constexpr size_t kMaxTokenBytes = 4096;

  // InvalidArgument if the vocabulary is invalid (see Vocabulary) or a token is too long.
  static absl::StatusOr<std::unique_ptr<WordPieceModel>> Create(WordPieceConfig config);

  // InvalidArgument for an unknown word without an unknown token.
  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  WordPieceModel() = default;

  // All following members are constant after Create().
  PrefixTrie trie_;
  PrefixTrie::Node continuing_ = PrefixTrie::kNone;  // the node of continuing_subword_prefix
  std::optional<TokenId> unk_id_;
  size_t max_characters_ = 0;
};

class WordLevelModel : public TokenModel {
 public:
  // InvalidArgument if the vocabulary is invalid (see Vocabulary).
  static absl::StatusOr<std::unique_ptr<WordLevelModel>> Create(
      std::vector<std::pair<std::string, TokenId>> vocab, std::string_view unk_token);

  // InvalidArgument for an unknown word without an unknown token.
  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  WordLevelModel() = default;

  std::optional<TokenId> unk_id_;
};

}  // namespace moeserve

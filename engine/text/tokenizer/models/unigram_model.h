// The Unigram model: the tokens with the greatest sum of scores, with the results of Hugging Face's
// library.
#pragma once

#include <array>
#include <cstdint>
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

struct UnigramConfig {
  // The id of a token is its index.
  std::vector<std::pair<std::string, double>> vocab;
  // Stands for characters without tokens; adjacent ones become one token. If not set, a text with
  // such a character cannot be encoded.
  std::optional<TokenId> unk_id;
  // If true, unknown text becomes one token per byte, <0x00> to <0xFF>, if the vocabulary has the
  // tokens of all its bytes.
  bool byte_fallback = false;
};

class UnigramModel : public TokenModel {
 public:
  // Limits the work per byte of text; the tokens of real files have at most 100 bytes or so.
  static constexpr size_t kMaxTokenBytes = 1024;

  // InvalidArgument if a token is listed twice, is too long or not UTF-8, or if unk_id is no id.
  static absl::StatusOr<std::unique_ptr<UnigramModel>> Create(UnigramConfig config);

  // InvalidArgument if the text has an unknown character and there is no unk_id.
  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  UnigramModel() = default;
  // Appends the ids of a part of the best path that is a token or a run of unknown text.
  absl::Status AppendPart(std::string_view text, std::vector<TokenId>* ids) const;

  // All following members are constant after Create().
  PrefixTrie trie_;
  std::vector<double> scores_;  // by id
  double unknown_score_ = 0;
  std::optional<TokenId> unk_id_;
  bool byte_fallback_ = false;
  std::array<TokenId, 256> byte_ids_;  // ids of <0x00> to <0xFF>, or -1
};

}  // namespace moeserve

// Byte-pair encoding as subword-nmt applies it to the words of fairseq's translators: a word is cut
// into symbols, of which all but the last end with "@@".
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer/models/model.h"

namespace moeserve {

// What ends a symbol after which its word goes on.
inline constexpr std::string_view kSubwordMark = "@@";

struct SubwordNmtConfig {
  std::vector<std::pair<std::string, TokenId>> vocab;
  // In order of rank; the first merge is applied first. A symbol at the end of a word ends with
  // "</w>".
  std::vector<std::pair<std::string, std::string>> merges;
  std::string unk_token;  // stands for symbols that are not in the vocabulary
};

class SubwordNmtModel : public TokenModel {
 public:
  // Limits the work per byte of text. A word with more characters is unknown as a whole;
  // subword-nmt has no such limit.
  static constexpr size_t kMostCharacters = 256;

  // InvalidArgument if the vocabulary is invalid (see Vocabulary) or lacks the unknown token.
  static absl::StatusOr<std::unique_ptr<SubwordNmtModel>> Create(SubwordNmtConfig config);

  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  SubwordNmtModel() = default;

  // Returns the rank of a merge; SIZE_MAX if there is none.
  size_t RankOf(std::string_view left, std::string_view right) const;

  // Constant after Create().
  absl::flat_hash_map<std::string, size_t> ranks_;  // by both symbols with a space in between
  TokenId unk_id_ = 0;
};

}  // namespace moeserve

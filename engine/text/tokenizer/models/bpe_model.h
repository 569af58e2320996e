// Byte-pair encoding with ranked merges, with the results of Hugging Face's BPE model.
#pragma once

#include <array>
#include <cstdint>
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
#include "engine/text/tokenizer/string_map.h"

namespace moeserve {

struct BpeConfig {
  std::vector<std::pair<std::string, TokenId>> vocab;
  // In order of rank; the first merge is applied first.
  std::vector<std::pair<std::string, std::string>> merges;
  // If true, `merges` must be empty: any two tokens may merge if the vocabulary has the result, and
  // the result with the lowest id is merged first, as in tiktoken. Takes tokens of at most
  // kMaxSplitToken bytes.
  bool merges_by_id = false;
  // If true, symbols are bytes, and the vocabulary is spelt in the byte-level alphabet. If false,
  // symbols are characters.
  bool byte_level = true;
  // Replaces symbols that are not in the vocabulary; if not set, such symbols are dropped.
  std::optional<std::string> unk_token;
  // If true, adjacent unknown symbols become a single unk_token.
  bool fuse_unk = false;
  // If true, a symbol that is not in the vocabulary becomes one token per byte, <0x00> to <0xFF>,
  // if the vocabulary has the tokens of all its bytes.
  bool byte_fallback = false;
  // If true, a piece that equals a token becomes that token even if no merges produce it.
  bool ignore_merges = false;
};

class BpeModel : public TokenModel {
 public:
  // Limits the work of `merges_by_id`; the tokens of real files have at most 300 bytes or so.
  static constexpr size_t kMaxSplitToken = 1024;

  // InvalidArgument if an id is out of range or used twice, a token is listed twice, a merge has a
  // part or a result that is not in the vocabulary, or unk_token is needed and not in the
  // vocabulary.
  static absl::StatusOr<std::unique_ptr<BpeModel>> Create(BpeConfig config);

  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  struct Merge {
    uint32_t rank;
    TokenId result;
  };
  // A token and the size of its text in bytes of the piece.
  struct SizedToken {
    TokenId id;
    uint32_t size;
  };
  struct Symbol;
  struct Scratch;

  BpeModel() = default;
  // Adds every pair of tokens that a token of the vocabulary consists of.
  absl::Status AddMergesById();
  absl::Status AddMerges(const std::vector<std::pair<std::string, std::string>>& merges);
  void FindWholeWords();

  static uint64_t PairKey(TokenId left, TokenId right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  const Merge* FindMerge(TokenId left, TokenId right) const {
    const auto it = merges_.find(PairKey(left, right));
    return it == merges_.end() ? nullptr : &it->second;
  }

  // Applies the merges to `piece`, without looking up the whole piece first.
  void MergePiece(std::string_view piece, std::vector<TokenId>* ids,
                  std::vector<TextSpan>* spans) const;
  void AppendSymbols(std::string_view piece, std::vector<SizedToken>* symbols) const;
  void MergeShort(Scratch* scratch) const;
  void MergeLong(Scratch* scratch) const;

  // All following members are constant after Create().
  bool byte_level_ = true;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
  TokenId unk_id_ = -1;
  absl::flat_hash_map<uint64_t, Merge> merges_;  // by PairKey
  std::array<TokenId, 256> byte_ids_;            // byte_level: the symbol of each byte, or -1
  std::array<TokenId, 256> fallback_ids_;        // ids of <0x00> to <0xFF>, or -1
  // Pieces that merge to a single token; this covers most words of a text.
  StringMap<TokenId> whole_words_;  // keys point into whole_word_text_
  std::string whole_word_text_;
};

}  // namespace moeserve

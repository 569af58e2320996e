// SentencePiece's models, with the results of its program spm_encode. They read text that
// SentencePieceNormalizer has normalised.
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
#include "engine/text/tokenizer/string_map.h"

namespace moeserve {

enum class PieceType {
  kNormal,
  kUnknown,      // stands for text without a piece
  kControl,      // never found in a text
  kUserDefined,  // found in a text before others
  kUnused,       // never a result
  kByte,         // <0x00> to <0xFF>
};

struct SentencePiece {
  std::string text;
  float score = 0;
  PieceType type = PieceType::kNormal;
};

struct SentencePieceConfig {
  enum class Algorithm { kUnigram, kBpe };
  Algorithm algorithm = Algorithm::kUnigram;
  std::vector<SentencePiece> pieces;  // the id of a piece is its index
  bool byte_fallback = false;         // unknown text becomes one piece per byte
};

class SentencePieceModel : public TokenModel {
 public:
  // Limits the work per byte of text; the pieces of real files have at most 100 bytes or so.
  static constexpr size_t kMaxPieceBytes = 1024;

  // InvalidArgument if a piece is empty, too long, not UTF-8 or listed twice, a score is not
  // finite, there is not exactly one unknown piece, or byte pieces are missing or invalid.
  static absl::StatusOr<std::unique_ptr<SentencePieceModel>> Create(SentencePieceConfig config);

  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  // A part of the text and its id.
  struct Part {
    std::string_view text;
    TokenId id;
  };
  struct Symbol;

  SentencePieceModel() = default;
  void SplitUnigram(std::string_view text, std::vector<Part>* parts) const;
  void SplitBpe(std::string_view text, std::vector<Part>* parts) const;
  std::vector<Symbol> InitialSymbols(std::string_view text) const;

  // Returns the piece that a text may become by merging, or -1.
  TokenId FindMerged(std::string_view text) const;

  // All following members are constant after Create().
  SentencePieceConfig::Algorithm algorithm_ = SentencePieceConfig::Algorithm::kUnigram;
  std::vector<PieceType> types_;  // by id
  std::vector<float> scores_;     // by id
  PrefixTrie trie_;               // normal, user-defined and unused pieces
  PrefixTrie user_defined_;
  size_t longest_piece_ = 0;  // in bytes
  float lowest_score_ = 0;    // of normal pieces
  TokenId unk_id_ = 0;
  bool byte_fallback_ = false;
  std::array<TokenId, 256> byte_ids_;
};

}  // namespace moeserve

// A tokenizer that consists of exchangeable stages: added tokens, normalizer, pre-tokenizer, model,
// frames (ids around texts, such as BOS), decoder.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer/added_tokens.h"
#include "engine/text/tokenizer/decoders/decoder.h"
#include "engine/text/tokenizer/frames.h"
#include "engine/text/tokenizer/models/model.h"
#include "engine/text/tokenizer/normalizers/normalizer.h"
#include "engine/text/tokenizer/pre_tokenizer.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

struct SpanTrim {
  // The first space of a text was added to it, so it has no place in the text.
  bool added_first_space = true;
};

struct PipelineParts {
  std::unique_ptr<TokenModel> model;
  std::unique_ptr<AddedTokens> added_tokens;    // never null; may hold no tokens
  std::unique_ptr<Normalizer> normalizer;       // null: no normalization
  std::unique_ptr<PreTokenizer> pre_tokenizer;  // null: no splitting
  std::unique_ptr<Decoder> decoder;
  Frames frames;
  // Each leaves white space at the ends of byte-level tokens out of their spans, as the option
  // trim_offsets does.
  std::vector<SpanTrim> trims = {};
};

class PipelineTokenizer : public Tokenizer {
 public:
  // InvalidArgument if a frame has an id that is no token.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(PipelineParts parts);

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool add_special_tokens,
                                              bool parse_special = true) const override;
  absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                     std::span<const TextSpan> trusted,
                                                     bool add_special_tokens) const override;
  absl::StatusOr<EncodedTexts> EncodeTexts(std::string_view text,
                                           std::optional<std::string_view> pair,
                                           bool add_special_tokens,
                                           const TokenLimit& limit = {}) const override;
  absl::StatusOr<std::string> Decode(std::span<const TokenId> ids,
                                     bool skip_special_tokens) const override;
  std::string TokenBytes(TokenId id) const override;
  std::string_view TokenString(TokenId id) const override;
  std::optional<TokenId> TokenToId(std::string_view token) const override;
  bool IsSpecial(TokenId id) const override;
  int vocab_size() const override;
  std::unique_ptr<DecodeStream> NewDecodeStream(bool skip_special_tokens,
                                                std::span<const TokenId> kept = {}) const override;

 private:
  class Stream;

  // Where a token of a text stands.
  struct Place {
    TextSpan span;
    bool added;  // the text spells an added token there
  };

  explicit PipelineTokenizer(PipelineParts parts) : parts_(std::move(parts)) {}

  absl::StatusOr<std::vector<TokenId>> EncodeInFrame(std::string_view text,
                                                     const SpecialRule& special,
                                                     bool add_special_tokens) const;
  // Appends the ids of `text` and, unless `places` is null, the places that they stand for.
  absl::Status EncodeText(std::string_view text, const SpecialRule& special,
                          std::vector<TokenId>* ids, std::vector<Place>* places) const;
  // Does the work of SpanTrim for the tokens of one text.
  void TrimSpans(std::string_view text, const std::vector<TokenId>& ids,
                 std::vector<Place>* places) const;
  // Returns the decoder's input for this id; nullopt for an unknown id.
  std::optional<std::string_view> DecodedForm(TokenId id) const;

  const PipelineParts parts_;
};

}  // namespace moeserve

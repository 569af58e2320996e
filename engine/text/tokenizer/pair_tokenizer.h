// The tokenizer of a translator with a dictionary for each of its languages.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// Does everything with `target`, the tokenizer of the decoder's texts; source() is the other one.
class PairTokenizer : public Tokenizer {
 public:
  // Both must not be null.
  PairTokenizer(std::unique_ptr<Tokenizer> source, std::unique_ptr<Tokenizer> target)
      : source_(std::move(source)), target_(std::move(target)) {}

  const Tokenizer& source() const override { return *source_; }

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool add_special_tokens,
                                              bool parse_special = true) const override {
    return target_->Encode(text, add_special_tokens, parse_special);
  }
  absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                     std::span<const TextSpan> trusted,
                                                     bool add_special_tokens) const override {
    return target_->EncodeTrusted(text, trusted, add_special_tokens);
  }
  absl::StatusOr<EncodedTexts> EncodeTexts(std::string_view text,
                                           std::optional<std::string_view> pair,
                                           bool add_special_tokens,
                                           const TokenLimit& limit = {}) const override {
    return target_->EncodeTexts(text, pair, add_special_tokens, limit);
  }
  absl::StatusOr<std::string> Decode(std::span<const TokenId> ids,
                                     bool skip_special_tokens) const override {
    return target_->Decode(ids, skip_special_tokens);
  }
  std::string TokenBytes(TokenId id) const override { return target_->TokenBytes(id); }
  std::string_view TokenString(TokenId id) const override { return target_->TokenString(id); }
  std::optional<TokenId> TokenToId(std::string_view token) const override {
    return target_->TokenToId(token);
  }
  bool IsSpecial(TokenId id) const override { return target_->IsSpecial(id); }
  int vocab_size() const override { return target_->vocab_size(); }
  std::unique_ptr<DecodeStream> NewDecodeStream(bool skip_special_tokens,
                                                std::span<const TokenId> kept = {}) const override {
    return target_->NewDecodeStream(skip_special_tokens, kept);
  }

 private:
  const std::unique_ptr<Tokenizer> source_;
  const std::unique_ptr<Tokenizer> target_;
};

}  // namespace moeserve

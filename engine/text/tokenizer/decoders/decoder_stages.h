// The stages of Hugging Face's decoders. Each state hands on text as soon as no later token can
// change it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "engine/text/tokenizer/decoders/decoder.h"

namespace moeserve {

// Converts byte-level spellings to bytes and joins all tokens to one. A token with a character
// outside the byte-level alphabet contributes its own UTF-8.
class ByteLevelStage : public DecoderStage {
 public:
  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;
};

// Converts tokens such as <0x0A> to bytes. A run of them that is not UTF-8 becomes one U+FFFD for
// each byte; therefore a run is held back until it ends.
class ByteFallbackStage : public DecoderStage {
 public:
  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;
};

// Replaces every occurrence of `literal`, which must not be empty, in each token.
std::unique_ptr<DecoderStage> ReplaceStage(std::string literal, std::string content);

// Removes up to `start` characters `content` from the start and up to `stop` from the end of each
// token or, if `fused`, of the whole text.
std::unique_ptr<DecoderStage> StripStage(std::string content, size_t start, size_t stop,
                                         bool fused);

// Replaces a character by a space; in the first token, removes it if `drops_first`.
std::unique_ptr<DecoderStage> MetaspaceStage(std::string replacement, bool drops_first);

// Puts spaces between words; a token with `prefix` continues a word. With `cleanup`, also removes
// spaces before punctuation.
std::unique_ptr<DecoderStage> WordPieceStage(std::string prefix, bool cleanup);

// Replaces `suffix`, which must not be empty, by a space, in the last token by nothing.
class WordEndStage : public DecoderStage {
 public:
  explicit WordEndStage(std::string suffix) : suffix_(std::move(suffix)) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;

 private:
  std::string suffix_;
};

}  // namespace moeserve

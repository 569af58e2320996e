// The steps of Hugging Face's decoders. Each state hands on text as soon as no later token can
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
class ByteLevelStep : public DecoderStep {
 public:
  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;
};

// Converts tokens such as <0x0A> to bytes. A run of them that is not UTF-8 becomes one U+FFFD for
// each byte; therefore a run is held back until it ends.
class ByteFallbackStep : public DecoderStep {
 public:
  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;
};

// Replaces every occurrence of `literal`, which must not be empty, in each token.
class ReplaceStep : public DecoderStep {
 public:
  ReplaceStep(std::string literal, std::string content)
      : literal_(std::move(literal)), content_(std::move(content)) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;

 private:
  std::string literal_;
  std::string content_;
};

// Removes up to `start` characters `content` from the start and up to `stop` from the end of each
// token or, if `fused`, of the whole text.
class StripStep : public DecoderStep {
 public:
  StripStep(std::string content, size_t start, size_t stop, bool fused)
      : content_(std::move(content)), start_(start), stop_(stop), fused_(fused) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;

 private:
  std::string content_;  // one character
  size_t start_;
  size_t stop_;
  bool fused_;
};

// Replaces a character by a space; in the first token, removes it if `drops_first`.
class MetaspaceStep : public DecoderStep {
 public:
  MetaspaceStep(std::string replacement, bool drops_first)
      : replacement_(std::move(replacement)), drops_first_(drops_first) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;

 private:
  std::string replacement_;
  bool drops_first_;
};

// Puts spaces between words; a token with `prefix` continues a word. With `cleanup`, also removes
// spaces before punctuation.
class WordPieceStep : public DecoderStep {
 public:
  WordPieceStep(std::string prefix, bool cleanup) : prefix_(std::move(prefix)), cleanup_(cleanup) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override { return Convert(token, false); }

 private:
  std::string Convert(std::string_view token, bool first) const;

  std::string prefix_;
  bool cleanup_;
};

// Replaces `suffix`, which must not be empty, by a space, in the last token by nothing.
class WordEndStep : public DecoderStep {
 public:
  explicit WordEndStep(std::string suffix) : suffix_(std::move(suffix)) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override;
  std::string TokenBytes(std::string token) const override;

 private:
  std::string suffix_;
};

}  // namespace moeserve

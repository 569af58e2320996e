// Decoders turn the spellings of tokens back into text.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {

// State of decoding one sequence.
class DecoderState {
 public:
  virtual ~DecoderState() = default;
  // Takes the vocabulary's spelling of the next token and appends the text that is now final.
  virtual void Push(std::string_view token, std::string* out) = 0;
  virtual void Finish(std::string* out) = 0;
};

// Immutable after construction, for any number of threads.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual std::unique_ptr<DecoderState> Start() const = 0;
  // The bytes that one token contributes, without regard to its neighbours.
  virtual std::string TokenBytes(std::string_view token) const = 0;
};

// Byte-level spellings back to bytes; a token with a character outside that alphabet stands for its
// own UTF-8.
class ByteLevelDecoder : public Decoder {
 public:
  std::unique_ptr<DecoderState> Start() const override;
  std::string TokenBytes(std::string_view token) const override;
};

// The spellings themselves with `separator` in between.
class JoinDecoder : public Decoder {
 public:
  explicit JoinDecoder(std::string separator) : separator_(std::move(separator)) {}

  std::unique_ptr<DecoderState> Start() const override;
  std::string TokenBytes(std::string_view token) const override { return std::string(token); }

 private:
  std::string separator_;
};

}  // namespace moeserve

// Decoders convert the spellings of tokens in the vocabulary to text.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {

// The state of decoding one sequence.
class DecoderState {
 public:
  virtual ~DecoderState() = default;
  // Reads the next token as the vocabulary spells it and appends the text that has become final.
  virtual void Push(std::string_view token, std::string* out) = 0;
  virtual void Finish(std::string* out) = 0;
};

// Immutable after construction; any number of threads may use one object.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual std::unique_ptr<DecoderState> Start() const = 0;
  // Returns the bytes that one token contributes to a text, whatever its neighbours are.
  virtual std::string TokenBytes(std::string_view token) const = 0;
};

// Converts byte-level spellings to bytes. A token with a character outside the byte-level alphabet
// contributes its own UTF-8.
class ByteLevelDecoder : public Decoder {
 public:
  std::unique_ptr<DecoderState> Start() const override;
  std::string TokenBytes(std::string_view token) const override;
};

// Concatenates the spellings, with `separator` between them.
class JoinDecoder : public Decoder {
 public:
  explicit JoinDecoder(std::string separator) : separator_(std::move(separator)) {}

  std::unique_ptr<DecoderState> Start() const override;
  std::string TokenBytes(std::string_view token) const override { return std::string(token); }

 private:
  std::string separator_;
};

}  // namespace moeserve

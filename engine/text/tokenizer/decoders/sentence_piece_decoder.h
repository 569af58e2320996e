// SentencePiece's decoding, with the results of its program spm_decode.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "engine/text/tokenizer/decoders/decoder.h"

namespace moeserve {

struct SentencePieceDecoding {
  std::string unknown_piece;
  std::string unknown_surface;  // what the unknown piece becomes
  bool byte_fallback = false;   // pieces such as <0x0A> are bytes
  // What is removed from the start of a text: one space, all of them, or none.
  bool removes_first_space = true;
  bool removes_leading_spaces = false;
};

// Control pieces are hidden by skipping them; if they are not skipped, they show their own text.
class SentencePieceDecoder : public Decoder {
 public:
  explicit SentencePieceDecoder(SentencePieceDecoding rules) : rules_(std::move(rules)) {}

  std::unique_ptr<DecoderState> Start() const override;
  std::string TokenBytes(std::string_view token) const override;

 private:
  SentencePieceDecoding rules_;
};

}  // namespace moeserve

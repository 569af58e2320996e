#include "engine/text/tokenizer/decoders/sentence_piece_decoder.h"

#include <optional>

#include "engine/text/tokenizer/decoders/byte_token.h"
#include "engine/text/tokenizer/normalizers/text_edits.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

constexpr std::string_view kSpace = "▁";

class State : public DecoderState {
 public:
  explicit State(const SentencePieceDecoding* rules) : rules_(rules) {}

  void Push(std::string_view token, std::string* out) override {
    if (rules_->byte_fallback) {
      if (const std::optional<char> byte = ByteOfToken(token); byte.has_value()) {
        bytes_.push_back(*byte);
        TakeCharacters(/*at_end=*/false, out);
        return;
      }
    }
    TakeCharacters(/*at_end=*/true, out);
    if (removed_space_ || any_text_) at_start_ = false;
    removed_space_ = false;
    if (token == rules_->unknown_piece) {
      Append(rules_->unknown_surface, out);
      return;
    }
    if (at_start_ && rules_->removes_first_space && token.starts_with(kSpace)) {
      token.remove_prefix(kSpace.size());
      removed_space_ = !rules_->removes_leading_spaces;
    }
    Append(ReplaceAll(token, kSpace, " "), out);
  }
  void Skip(std::string* out) override { TakeCharacters(/*at_end=*/true, out); }
  void Finish(std::string* out) override { TakeCharacters(/*at_end=*/true, out); }
  std::unique_ptr<DecoderState> Clone() const override { return std::make_unique<State>(*this); }

 private:
  void Append(std::string_view text, std::string* out) {
    any_text_ = any_text_ || !text.empty();
    out->append(text);
  }

  // Appends the characters that the waiting bytes form; a byte that is no part of one becomes
  // U+FFFD. Unless `at_end`, bytes that may become a character with later ones keep waiting.
  void TakeCharacters(bool at_end, std::string* out) {
    while (!bytes_.empty()) {
      Utf8Assembler assembler;
      std::string text;
      size_t size = 0;
      // The bytes are a prefix of a character as long as the assembler returns nothing.
      while (size < bytes_.size() && text.empty()) {
        assembler.Push(std::string_view(bytes_).substr(size++, 1), &text);
      }
      if (text.empty() && !at_end) return;
      const bool whole =
          size <= bytes_.size() && IsValidUtf8(std::string_view(bytes_).substr(0, size));
      const size_t taken = whole ? size : 1;
      Append(whole ? std::string_view(bytes_).substr(0, size) : "\uFFFD", out);
      bytes_.erase(0, taken);
    }
  }

  const SentencePieceDecoding* rules_;
  std::string bytes_;  // at most 4
  bool at_start_ = true;
  bool removed_space_ = false;  // by the last piece
  bool any_text_ = false;
};

}  // namespace

std::unique_ptr<DecoderState> SentencePieceDecoder::Start() const {
  return std::make_unique<State>(&rules_);
}

std::string SentencePieceDecoder::TokenBytes(std::string_view token) const {
  if (token == rules_.unknown_piece) return rules_.unknown_surface;
  const std::optional<char> byte = rules_.byte_fallback ? ByteOfToken(token) : std::nullopt;
  return byte.has_value() ? std::string(1, *byte) : ReplaceAll(token, kSpace, " ");
}

}  // namespace moeserve

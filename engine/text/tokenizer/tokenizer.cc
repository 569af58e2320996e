#include "engine/text/tokenizer/tokenizer.h"

#include <algorithm>

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

class ByteJoinStream : public DecodeStream {
 public:
  ByteJoinStream(const Tokenizer* tokenizer, bool skip_special_tokens,
                 std::span<const TokenId> kept)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens), kept_(kept) {}

  void Push(TokenId id, std::string* out) override {
    if (skip_special_tokens_ && tokenizer_->IsSpecial(id) &&
        !std::binary_search(kept_.begin(), kept_.end(), id)) {
      return;
    }
    assembler_.Push(tokenizer_->TokenBytes(id), out);
  }

  void Finish(std::string* out) override { assembler_.Finish(out); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  std::span<const TokenId> kept_;
  Utf8Assembler assembler_;
};

}  // namespace

absl::StatusOr<EncodedTexts> Tokenizer::EncodeTexts(std::string_view,
                                                    std::optional<std::string_view>, bool,
                                                    const TokenLimit&) const {
  return absl::UnimplementedError("this tokenizer does not say where its tokens come from");
}

std::unique_ptr<DecodeStream> Tokenizer::NewDecodeStream(bool skip_special_tokens,
                                                         std::span<const TokenId> kept) const {
  return std::make_unique<ByteJoinStream>(this, skip_special_tokens, kept);
}

IncrementalDecoder::IncrementalDecoder(const Tokenizer* tokenizer, bool skip_special_tokens,
                                       std::span<const TokenId> kept)
    : stream_(tokenizer->NewDecodeStream(skip_special_tokens, kept)) {}

std::string IncrementalDecoder::Push(TokenId id) {
  std::string out;
  stream_->Push(id, &out);
  return out;
}

std::string IncrementalDecoder::Finish() {
  std::string out;
  stream_->Finish(&out);
  return out;
}

}  // namespace moeserve

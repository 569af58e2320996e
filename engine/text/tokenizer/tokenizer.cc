#include "engine/text/tokenizer/tokenizer.h"

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

class ByteJoinStream : public DecodeStream {
 public:
  ByteJoinStream(const Tokenizer* tokenizer, bool skip_special_tokens)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

  void Push(TokenId id, std::string* out) override {
    if (skip_special_tokens_ && tokenizer_->IsSpecial(id)) return;
    assembler_.Push(tokenizer_->TokenBytes(id), out);
  }

  void Finish(std::string* out) override { assembler_.Finish(out); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  Utf8Assembler assembler_;
};

}  // namespace

std::unique_ptr<DecodeStream> Tokenizer::NewDecodeStream(bool skip_special_tokens) const {
  return std::make_unique<ByteJoinStream>(this, skip_special_tokens);
}

IncrementalDecoder::IncrementalDecoder(const Tokenizer* tokenizer, bool skip_special_tokens)
    : stream_(tokenizer->NewDecodeStream(skip_special_tokens)) {}

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

#include "engine/text/tokenizer/decoder.h"

#include "engine/text/tokenizer/byte_level.h"

namespace moeserve {
namespace {

class ByteLevelState : public DecoderState {
 public:
  void Push(std::string_view token, std::string* out) override {
    bytes_.clear();
    if (AppendByteLevelBytes(token, &bytes_)) {
      assembler_.Push(bytes_, out);
    } else {
      assembler_.Push(token, out);
    }
  }
  void Finish(std::string* out) override { assembler_.Finish(out); }

 private:
  std::string bytes_;  // scratch, kept to reuse its memory
  Utf8Assembler assembler_;
};

class JoinState : public DecoderState {
 public:
  explicit JoinState(std::string_view separator) : separator_(separator) {}

  void Push(std::string_view token, std::string* out) override {
    if (!first_) out->append(separator_);
    first_ = false;
    out->append(token);
  }
  void Finish(std::string*) override {}

 private:
  std::string_view separator_;
  bool first_ = true;
};

}  // namespace

std::unique_ptr<DecoderState> ByteLevelDecoder::Start() const {
  return std::make_unique<ByteLevelState>();
}

std::string ByteLevelDecoder::TokenBytes(std::string_view token) const {
  std::string bytes;
  if (!AppendByteLevelBytes(token, &bytes)) bytes = token;
  return bytes;
}

std::unique_ptr<DecoderState> JoinDecoder::Start() const {
  return std::make_unique<JoinState>(separator_);
}

}  // namespace moeserve

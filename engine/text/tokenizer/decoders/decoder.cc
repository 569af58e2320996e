#include "engine/text/tokenizer/decoders/decoder.h"

namespace moeserve {
namespace {

// The end of a chain: concatenates the tokens.
class JoinState : public DecoderState {
 public:
  explicit JoinState(std::string_view separator) : separator_(separator) {}

  void Push(std::string_view token, std::string* out) override {
    if (!first_) out->append(separator_);
    first_ = false;
    out->append(token);
  }
  void Finish(std::string*) override {}
  std::unique_ptr<DecoderState> Clone() const override {
    return std::make_unique<JoinState>(*this);
  }

 private:
  std::string_view separator_;
  bool first_ = true;
};

}  // namespace

std::unique_ptr<DecoderState> ChainDecoder::Start() const {
  std::unique_ptr<DecoderState> state = std::make_unique<JoinState>(separator_);
  for (auto stage = stages_.rbegin(); stage != stages_.rend(); ++stage) {
    state = (*stage)->Start(std::move(state));
  }
  return state;
}

std::string ChainDecoder::TokenBytes(std::string_view token) const {
  std::string bytes(token);
  for (const auto& stage : stages_) bytes = stage->TokenBytes(std::move(bytes));
  return bytes;
}

}  // namespace moeserve

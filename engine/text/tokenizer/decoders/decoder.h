// Decoders convert the spellings of tokens in the vocabulary to text.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moeserve {

// The state of decoding one sequence.
class DecoderState {
 public:
  virtual ~DecoderState() = default;
  // Reads the next token as the vocabulary spells it and appends the text that has become final.
  virtual void Push(std::string_view token, std::string* out) = 0;
  // Notes that a token was left out here.
  virtual void Skip(std::string* /*out*/) {}
  virtual void Finish(std::string* out) = 0;
  // Returns an equal state of its own.
  virtual std::unique_ptr<DecoderState> Clone() const = 0;
};

// The state that another one hands its tokens to. A copy has a state of its own.
class NextState {
 public:
  explicit NextState(std::unique_ptr<DecoderState> state) : state_(std::move(state)) {}
  NextState(const NextState& other) : state_(other.state_->Clone()) {}
  NextState(NextState&&) = default;
  DecoderState* operator->() const { return state_.get(); }

 private:
  std::unique_ptr<DecoderState> state_;
};

// Immutable after construction; any number of threads may use one object.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual std::unique_ptr<DecoderState> Start() const = 0;
  // Returns the bytes that one token contributes to a text, whatever its neighbours are.
  virtual std::string TokenBytes(std::string_view token) const = 0;
};

// One stage of a chain of decoders. Immutable after construction; any number of threads may use one
// object.
class DecoderStage {
 public:
  virtual ~DecoderStage() = default;
  // Returns a state that changes tokens and hands them to `next`.
  virtual std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const = 0;
  // Returns what the stage makes of a token, whatever its neighbours are. `token` need not be
  // UTF-8.
  virtual std::string TokenBytes(std::string token) const = 0;
};

// Applies its stages in order and concatenates their results, with `separator` between them.
class ChainDecoder : public Decoder {
 public:
  explicit ChainDecoder(std::vector<std::unique_ptr<DecoderStage>> stages,
                        std::string separator = "")
      : stages_(std::move(stages)), separator_(std::move(separator)) {}

  std::unique_ptr<DecoderState> Start() const override;
  std::string TokenBytes(std::string_view token) const override;

 private:
  std::vector<std::unique_ptr<DecoderStage>> stages_;
  std::string separator_;
};

}  // namespace moeserve

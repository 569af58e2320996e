// Turns the logits of a step's rows into the next piece of a response.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/sample/sampler.h"
#include "engine/sequence/sequence.h"

namespace moeserve {

// The logits of one sequence's rows in a step.
struct RowLogits {
  std::span<const int32_t> positions;   // [n] ascending positions of the rows
  std::span<const float> values;        // [n, V]; undefined if `drawn` is set
  const SampleResult* drawn = nullptr;  // [n] the device's draws; null if the host draws
};

// The error of a request whose masks leave no token.
absl::Status NoTokenError();

// Returns what the device needs to draw, from `row` of the step's logits, the token that is `ahead`
// places behind the sequence's next one; nullopt if the device cannot draw it.
std::optional<SampleRow> DeviceSample(const Sequence& sequence, int row, int ahead,
                                      const TextlessIds& textless);

// Chooses tokens for sequences whose rows were computed. Only one thread at a time may use it.
class TokenStep {
 public:
  // `eos` and `textless` outlive the object. The ids in `textless` are never drawn.
  TokenStep(std::span<const TokenId> eos, const TextlessIds& textless, int vocab_size,
            int max_model_len)
      : eos_(eos), textless_(textless), vocab_size_(vocab_size), max_model_len_(max_model_len) {}

  // Stores the log-probabilities of the prompt tokens that these rows predict.
  void CollectPromptLogprobs(Sequence& sequence, const RowLogits& logits) const;

  // Draws the next token from row `row` of `logits` and appends it to the sequence.
  // OutputDelta::finished reports whether the response is complete. InvalidArgument if the
  // request's masks allow no token.
  Result<OutputDelta> Next(Sequence& sequence, const RowLogits& logits, size_t row);

  // If the request's masks allow a single token, so that the logits do not matter, appends it to
  // the sequence. nullopt, and no change, if there is a choice, if the token would end the response
  // (so the tokens before the last one are always computed), or if log-probabilities are requested.
  std::optional<OutputDelta> NextWithoutChoice(Sequence& sequence);

  // For beam search: sets `out` [V] to the log-probabilities of the tokens that may follow the
  // sequence, from the logits [V] behind its last token. They are changed by the request's biases,
  // masks and penalties and not normalised again. Tokens without a text get -infinity. Returns
  // false if no token is allowed; then, as after a call that leaves SamplingState::overworked(),
  // the sequence cannot go on.
  bool Logprobs(Sequence& sequence, std::span<const float> logits, std::span<float> out) const;

  // Returns the log-probability of a token that follows the sequence, as the model has it, and the
  // alternatives to it. `logits` [V] are those behind the sequence's last token.
  TokenLogprob LogprobOf(std::span<const float> logits, TokenId token, int top);

  // Whether the token is an end of the text that the request does not ignore.
  bool IsEos(const SamplingParams& params, TokenId token) const;
  // Returns the ids that end a response, whatever its text.
  std::vector<TokenId> EndIds(const SamplingParams& params) const;

  // Returns the counts of tokens and times of a response so far.
  static Usage UsageOf(const Sequence& sequence);

  // Returns the last piece of a response that ends before its next token: the text that was held
  // back.
  static OutputDelta CutOff(Sequence& sequence);

 private:
  // Returns the logits of a row from which tokens are drawn if the request changes none of them:
  // the textless ids are cut off, or -infinity in `scratch`.
  std::span<const float> Drawable(std::span<const float> row, std::vector<float>& scratch) const;
  // Sets changed_ to the logits of `row` after the request's masks and penalties. Returns false if
  // no token is allowed.
  bool ChangeLogits(Sequence& sequence, std::span<const float> row);

  const std::span<const TokenId> eos_;
  const TextlessIds& textless_;
  const int vocab_size_;
  const int max_model_len_;
  Sampler sampler_;
  std::vector<float> changed_;   // [V] scratch
  std::vector<float> drawable_;  // [V] scratch
};

}  // namespace moeserve

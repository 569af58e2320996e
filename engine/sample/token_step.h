// Turns the logits of a step's rows into the next piece of an answer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/sample/sampler.h"
#include "engine/schedule/sequence.h"

namespace moeserve {

// Logits of rows of one sequence.
struct RowLogits {
  std::span<const int32_t> positions;   // [n] ascending token numbers of the rows
  std::span<const float> values;        // [n, V]; undefined with `drawn`
  const SampleResult* drawn = nullptr;  // drawn by the device from the only row; null: none
};

// Returns how the device draws the sequence's next token from `row` of the step's logits; empty if
// it cannot.
std::optional<SampleRow> DeviceSample(const Sequence& sequence, int row);

// Chooses tokens for sequences whose rows were run. One thread at a time.
class TokenStep {
 public:
  // `eos` outlives the object.
  TokenStep(std::span<const TokenId> eos, int vocab_size, int max_model_len)
      : eos_(eos), vocab_size_(vocab_size), max_model_len_(max_model_len) {}

  // Stores the log-probabilities of prompt tokens that these rows predict.
  void CollectPromptLogprobs(Sequence& sequence, const RowLogits& logits) const;

  // Draws the next token from the last row of `logits` and appends it. The delta says whether the
  // answer is finished. InvalidArgument: the request's masks allow no token.
  Result<OutputDelta> Next(Sequence& sequence, const RowLogits& logits);

 private:
  const std::span<const TokenId> eos_;
  const int vocab_size_;
  const int max_model_len_;
  Sampler sampler_;
  std::vector<float> changed_;  // [V] scratch
};

}  // namespace moeserve

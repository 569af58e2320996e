// Logits to tokens and log-probabilities. Deterministic: the draw depends on the seed, the sample
// index and the position alone.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace moeserve {

// Chooses tokens for one sequence; holds scratch memory, so one thread at a time.
class Sampler {
 public:
  // `step` counts the tokens of this sequence drawn before. `seed` is the request's, or a random
  // one chosen once per request. Logits must not hold NaN.
  TokenId Sample(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                 int64_t step);

 private:
  std::vector<std::pair<float, TokenId>> candidates_;
  std::vector<double> weights_;
};

// The largest logit; ties go to the lower id.
TokenId ArgMax(std::span<const float> logits);

// Log-probability of `token` under the softmax of the logits, its rank, and the `top` most
// probable tokens (descending, ties: lower id first).
TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top);

// A uniform number in [0, 1) with 53 random bits.
double UniformDraw(uint64_t seed, int64_t sample_index, int64_t step);

}  // namespace moeserve

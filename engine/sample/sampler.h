// Logits to tokens and log-probabilities. Deterministic: the draw depends on the seed, the sample
// index and the position alone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/request.h"
#include "kernels/base/sampling.h"

namespace moeserve {

// Sampling state of one sequence that depends on its earlier tokens.
class SamplingState {
 public:
  // `params` and `prompt` must outlive the object. `eos` are the ids that end an answer.
  SamplingState(const SamplingParams& params, std::span<const TokenId> prompt,
                std::span<const TokenId> eos);

  // Whether Apply() changes logits.
  bool changes_logits() const { return changes_; }

  // Applies biases, masks and penalties, in that order; forbidden tokens get -infinity. `history`
  // is the prompt and the tokens after it. Returns false if no token is allowed.
  bool Apply(std::span<const TokenId> history, std::span<float> logits);

  // Call with every token that was chosen.
  void Accept(TokenId token);

  // Whether the structured output is complete and only EOS may follow.
  bool constraint_ended() const;

 private:
  void ForbidEnds(std::span<float> logits) const;
  void ForbidBadWords(std::span<const TokenId> history, std::span<float> logits) const;
  void Penalise(std::span<float> logits) const;

  const SamplingParams& params_;
  std::span<const TokenId> eos_;
  bool changes_ = false;
  int generated_ = 0;
  absl::flat_hash_map<TokenId, int> counts_;  // of generated tokens; 0 for those of the prompt
  std::unique_ptr<ConstraintState> constraint_;
  std::vector<uint32_t> mask_;
};

// Chooses tokens; holds scratch memory, so one thread at a time.
class Sampler {
 public:
  // `step`: number of tokens drawn before for this sequence. `seed`: the request's, or a random one
  // chosen once per request. Logits must not contain NaN; a token with -infinity is drawn only if
  // all have it. Draws by inverse CDF over the kept tokens in order of id. Weights are integers
  // (kernels/base/sampling.h), so that devices draw the same tokens.
  TokenId Sample(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                 int64_t step);
  // The same for a given uniform number (a multiple of 2^-53 in [0, 1)).
  TokenId Sample(std::span<const float> logits, const SamplingParams& params, double uniform);

 private:
  // Inputs of the weights of a row's tokens.
  struct Row {
    std::span<const float> logits;
    float highest;
    float scale;

    float Exponent(size_t i) const { return (logits[i] - highest) * scale; }
  };
  enum class Measure : uint8_t { kCount, kWeight };

  // Returns what top_k and top_p keep; all tokens if neither is set.
  SamplingCutoff Filter(const Row& row, const SamplingParams& params);
  // Sums of weights over blocks of tokens, and their total.
  uint64_t SumBlocks(const Row& row, const SamplingCutoff& cutoff, float min_p);
  // Returns the shortest prefix of the tokens by descending probability whose measure (count or
  // weight) reaches `target` > 0. Tokens below `floor` (kernels/base/sampling.h) do not count; if
  // the others do not suffice, all tokens are kept.
  SamplingCutoff Cut(const Row& row, Measure measure, uint64_t target, float floor);

  std::vector<uint64_t> block_mass_;
  std::vector<uint64_t> histogram_;
  std::vector<TokenId> candidates_;
};

// The largest logit; ties go to the lower id.
TokenId ArgMax(std::span<const float> logits);

// Log-probability of `token` under the softmax of the logits, its rank, and the `top` most
// probable tokens (descending, ties: lower id first).
TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top);

// A uniform number in [0, 1) with 53 random bits.
double UniformDraw(uint64_t seed, int64_t sample_index, int64_t step);

}  // namespace moeserve

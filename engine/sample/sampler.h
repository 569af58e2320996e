// Draws tokens from logits and computes log-probabilities. Deterministic: the draw depends only on
// the logits and parameters, the seed, the sample index and the number of tokens drawn before.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/request.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "kernels/base/sampling.h"

namespace moeserve {

// A token, and the state of the constraint (ConstraintState::StateHash()) before it.
struct ConstraintStep {
  uint64_t state = 0;
  TokenId token = 0;
};

// The sampling state of one sequence; it depends on the sequence's earlier tokens.
class SamplingState {
 public:
  // `params`, `prompt` and `eos` must outlive the object. Each id in `eos` ends the response.
  SamplingState(const SamplingParams& params, std::span<const TokenId> prompt,
                std::span<const TokenId> eos);

  // Whether Apply() changes logits.
  bool changes_logits() const { return changes_; }

  // Applies biases, masks and penalties, in that order, to logits or, for beam search, to
  // log-probabilities; forbidden tokens get -infinity. The masks are, in this order: structured
  // output and allowed_token_ids, no_repeat_ngram_size, bad_words, min_tokens. `history` is the
  // prompt followed by the generated tokens. Returns false if no token is allowed. If the state is
  // overworked() afterwards, the logits must not be used.
  bool Apply(std::span<const TokenId> history, std::span<float> logits);

  // Updates the state with a drawn token, unless the structured output could not be completed
  // within the limit of tokens after it (ConstraintState::AcceptInTime): then returns false, with
  // the state unchanged but for the masks, from now on of tokens that keep the limit. So the limit
  // changes no draw before it has to.
  bool AcceptInTime(TokenId token);
  // Updates the state with a chosen token; call this or AcceptInTime() for every chosen token.
  void Accept(TokenId token);

  // If masks allow a single token, whatever the logits, returns it. `textless` [ids, ascending]
  // are never drawn.
  std::optional<TokenId> OnlyToken(std::span<const TokenId> history, int vocab_size,
                                   std::span<const TokenId> textless);
  // Does what AcceptInTime() does, unless that returns false or the constraint ends after the
  // token: then returns false, with the state unchanged.
  bool AcceptUnlessLast(TokenId token);

  // Makes this the state of a sequence that continues that of `parent`: with equal parameters,
  // prompt and tokens so far.
  void Continue(const SamplingState& parent);
  // Does what AcceptInTime() does where that returns false, and changes nothing where it returns
  // true.
  bool AllowsInTime(TokenId token);
  // Whether the structured output would be complete after the token, and only EOS could follow.
  bool ConstraintEndsAfter(TokenId token) const;

  // If masks keep the limit of tokens since AcceptInTime() returned false: ignores the limit from
  // now on and returns true.
  bool IgnoreLimit();
  // The work of the structured output so far (ConstraintState::work()).
  int64_t constraint_work() const { return constraint_ == nullptr ? 0 : constraint_->work(); }
  // Whether the structured output takes too much work; then the response must end.
  bool overworked() const { return constraint_ != nullptr && constraint_->overworked(); }

  // Whether the structured output is complete and only EOS may follow.
  bool constraint_ended() const;

  const ConstraintState* constraint() const { return constraint_.get(); }  // null: there is none
  // From now on keeps the tokens that it accepts and the states of the constraint before them.
  void KeepSteps() { keeps_steps_ = constraint_ != nullptr; }
  // Returns the steps since the last call.
  std::vector<ConstraintStep> TakeSteps() { return std::exchange(steps_, {}); }

 private:
  // Number of tokens that may be generated after the next one.
  int64_t TokensAfterNext() const { return int64_t{params_.max_tokens} - generated_ - 1; }
  // Sets mask_ to the tokens that the constraint and allowed_token_ids allow.
  void FillMask(int vocab_size);
  // Returns the next token if it is forced.
  std::optional<TokenId> Forced() const;
  // Whether no_repeat_ngram_size, bad_words or min_tokens forbid the token.
  bool Forbids(std::span<const TokenId> history, TokenId token) const;
  // `state` is the hash of the constraint's state before the token, if steps are kept.
  void CountToken(TokenId token, uint64_t state);
  void ForbidEnds(std::span<float> logits) const;
  void ForbidRepeats(std::span<const TokenId> history, std::span<float> logits) const;
  void ForbidBadWords(std::span<const TokenId> history, std::span<float> logits) const;
  void Penalise(std::span<float> logits) const;

  const SamplingParams& params_;
  std::span<const TokenId> eos_;
  bool changes_ = false;
  int generated_ = 0;
  // Number of times a token was generated; 0 for tokens that are only in the prompt.
  absl::flat_hash_map<TokenId, int> counts_;
  std::unique_ptr<ConstraintState> constraint_;
  std::vector<uint32_t> mask_;
  bool mask_is_current_ = false;  // whether mask_ holds for the next token
  // What happens about the limit of tokens: each token is checked, masks keep it, or nothing.
  enum class Limit : uint8_t { kWatched, kKept, kIgnored };
  Limit limit_ = Limit::kWatched;
  bool keeps_steps_ = false;
  std::vector<ConstraintStep> steps_;
};

// Chooses tokens. Holds scratch memory, so only one thread at a time may use it.
class Sampler {
 public:
  // Draws a token. `step` is the number of tokens drawn before for this sequence; `seed` is the
  // request's, or a random one chosen once per request. Logits must not contain NaN; a token with
  // logit -infinity is drawn only if all logits are -infinity. The draw inverts the CDF over the
  // tokens that the filters keep, in order of id. Weights are integers (kernels/base/sampling.h),
  // so that every device draws the same token.
  TokenId Sample(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                 int64_t step);
  // Draws another token for the same step, after the first one was given up.
  TokenId SampleAgain(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                      int64_t step);
  // Draws a token as the overload above does, but from the given `uniform` number, a multiple of
  // 2^-53 in [0, 1).
  TokenId Sample(std::span<const float> logits, const SamplingParams& params, double uniform);

 private:
  // The logits of a row and what determines the tokens' weights.
  struct Row {
    std::span<const float> logits;
    float highest;
    float scale;

    float Exponent(size_t i) const { return (logits[i] - highest) * scale; }
  };
  enum class Measure : uint8_t { kCount, kWeight };

  // Returns the cutoff that top_k and top_p define; it keeps all tokens if neither is set.
  SamplingCutoff Filter(const Row& row, const SamplingParams& params);
  // Computes the sum of weights per block of tokens into block_mass_ and returns the total.
  uint64_t SumBlocks(const Row& row, const SamplingCutoff& cutoff, float min_p);
  // Returns the cutoff that keeps the shortest prefix of the tokens by descending probability whose
  // measure (number of tokens or weight) reaches `target` > 0. Tokens whose Row::Exponent() is
  // below `floor` do not count; if the other tokens do not reach the target, all tokens are kept.
  SamplingCutoff Cut(const Row& row, Measure measure, uint64_t target, float floor);

  std::vector<uint64_t> block_mass_;
  std::vector<uint64_t> histogram_;
  std::vector<TokenId> candidates_;
};

// Returns the token with the largest logit; ties: the lower id.
TokenId ArgMax(std::span<const float> logits);

// Returns the logarithm of the sum of the exponentials. A token's log-probability is its logit
// minus this number.
double LogSumExp(std::span<const float> logits);
// Returns the log-probability of `token` under the softmax of the logits, its rank, and the `top`
// most probable tokens (descending, ties: lower id first).
TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top);
// As above, but rank and most probable tokens are those among the tokens of `drawable`: the logits
// or the first of them, with -infinity for further tokens that are left out.
TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top,
                     std::span<const float> drawable);

// The ids of a model's vocabulary that a tokenizer does not know. They have no text: vocabularies
// are padded to a round size. They are never drawn.
class TextlessIds {
 public:
  TextlessIds() = default;  // there are none
  // `tokenizer` may be null: then every id can be drawn. So can the ids in `eos`, which end a
  // response.
  TextlessIds(const Tokenizer* tokenizer, std::span<const TokenId> eos, int vocab_size);

  bool empty() const { return ids_.empty(); }
  const std::vector<TokenId>& ids() const { return ids_; }  // ascending
  // If the ids are the last ones of the vocabulary, returns the number of the others.
  std::optional<int> drawable() const { return drawable_; }

 private:
  std::vector<TokenId> ids_;
  std::optional<int> drawable_;
};

// Returns a uniform number in [0, 1) with 53 random bits.
double UniformDraw(uint64_t seed, int64_t sample_index, int64_t step);

}  // namespace moeserve

// How tokens are sampled: the parameters, and the table of their names and ranges. Every reader of
// requests (HTTP, gRPC, the command line) and the engine's validation use this table.
// CONTRIBUTING.md lists the changes that a new parameter takes.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error_text.h"
#include "engine/beam/beam_params.h"
#include "engine/text/structured/constraint.h"
#include "engine/text/token_id.h"

namespace moeserve {

inline constexpr int kDefaultMaxTokens = 16;

// Order of operations for each token: logit_bias and masks, penalties, temperature, top_k, top_p,
// min_p, draw. The tables below list the ranges and meanings of numbers and flags; the initialisers
// in this struct are the defaults.
struct SamplingParams {
  double temperature = 1.0;
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  std::optional<int64_t> seed;  // nullopt: a fresh random seed
  int sample_index = 0;         // sample i of `n` draws from a stream derived from (seed, i)
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;
  // No sequence of so many tokens may occur twice in the prompt and the output; 0: all may.
  int no_repeat_ngram_size = 0;
  std::vector<std::pair<TokenId, float>> logit_bias;  // added to the logits
  std::vector<TokenId> allowed_token_ids;             // empty: every token is allowed
  // The last token of a word may not follow the word's other tokens.
  std::vector<std::vector<TokenId>> bad_words;
  std::shared_ptr<const CompiledConstraint> constraint;  // structured output; null: unconstrained
  // The first generated token, and the last one of max_tokens, whatever else allows or forbids
  // them; beams count a forced token with the log-probability 0. None together with `constraint`.
  std::optional<TokenId> forced_bos_token_id;
  std::optional<TokenId> forced_eos_token_id;
  int min_tokens = 0;
  int max_tokens = kDefaultMaxTokens;  // 0: only compute the prompt (echo)
  std::vector<std::string> stop;       // matched text is cut from the output unless include_stop
  bool include_stop = false;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  bool skip_special_tokens = true;
  std::optional<int> logprobs;         // for generated tokens: number of alternatives per token
  std::optional<int> prompt_logprobs;  // for prompt tokens: number of alternatives per token
  // Beam search instead of drawing. The biases, masks and penalties then change log-probabilities
  // instead of logits, and what is left is not normalised again.
  std::optional<BeamParams> beam;
};

// Describes one numeric member of SamplingParams. Integers are below 2^31, so a double holds each
// of them exactly.
struct SamplingField {
  const char* name;  // in JSON and protobuf; the command line writes "--top-p"
  std::variant<double SamplingParams::*, int SamplingParams::*> member;
  double min;
  double max;
  bool min_excluded;
  const char* meaning;  // one line of help text

  bool is_integer() const { return std::holds_alternative<int SamplingParams::*>(member); }
  bool Accepts(double value) const {  // false for NaN
    return value >= min && value <= max && !(min_excluded && value == min);
  }
  double Get(const SamplingParams& params) const {
    return std::visit([&](auto m) { return static_cast<double>(params.*m); }, member);
  }
  // Requires `value` to be in the range and, for an integer field, to be whole.
  void Set(SamplingParams& params, double value) const {
    if (is_integer()) {
      params.*std::get<int SamplingParams::*>(member) = static_cast<int>(value);
    } else {
      params.*std::get<double SamplingParams::*>(member) = value;
    }
  }
};

// Returns the range of a field for error messages: "a number above 0 to 1". Bounds are whole
// numbers.
inline std::string RangeText(const SamplingField& field) {
  return Concat("a number ", field.min_excluded ? "above " : "from ",
                static_cast<int64_t>(field.min), " to ", static_cast<int64_t>(field.max));
}

inline constexpr double kMaxSamplingInt = std::numeric_limits<int32_t>::max();

// Numbers that decide which tokens can be drawn, and how likely. Readers check the fields, and so
// report errors, in the order of the table.
inline constexpr SamplingField kDrawFields[] = {
    {"temperature", &SamplingParams::temperature, 0, 2, false,
     "Divides the logits; 0 takes the most probable token (ties: the lower id)"},
    {"top_p", &SamplingParams::top_p, 0, 1, false,
     "Draws from the fewest most probable tokens, at least one, that have this share of the "
     "probability"},
    {"min_p", &SamplingParams::min_p, 0, 1, false,
     "Draws from tokens with at least this probability, relative to the most probable one"},
    {"top_k", &SamplingParams::top_k, -1, kMaxSamplingInt, false,
     "Draws from this many most probable tokens; 0 or -1: from all"},
};

// Numbers by which earlier tokens change the logits of the next token.
inline constexpr SamplingField kPenaltyFields[] = {
    {"presence_penalty", &SamplingParams::presence_penalty, -2, 2, false,
     "Subtracted once from the logit of each token that was generated before"},
    {"frequency_penalty", &SamplingParams::frequency_penalty, -2, 2, false,
     "Subtracted from the logit of a token once for each time it was generated before"},
    {"repetition_penalty", &SamplingParams::repetition_penalty, 0, 100, true,
     "Divides positive and multiplies negative logits of tokens of the prompt or the output"},
    {"no_repeat_ngram_size", &SamplingParams::no_repeat_ngram_size, 0, kMaxSamplingInt, false,
     "No sequence of this many tokens occurs twice in the prompt and the output; 0: all may"},
    {"min_tokens", &SamplingParams::min_tokens, 0, kMaxSamplingInt, false,
     "Generates this many tokens before EOS, a stop token or a stop string can end the output"},
};

struct SamplingFlag {
  const char* name;
  bool SamplingParams::*member;
  const char* meaning;
};

inline constexpr SamplingFlag kSamplingFlags[] = {
    {"include_stop_str_in_output", &SamplingParams::include_stop,
     "Keeps the stop string that matched in the output"},
    {"ignore_eos", &SamplingParams::ignore_eos, "Goes on after an end-of-text token"},
    {"skip_special_tokens", &SamplingParams::skip_special_tokens,
     "Leaves special tokens out of the output text"},
};

// Bound on the absolute value of each logit_bias. It is an integer, so that error messages print it
// as one.
inline constexpr int kMaxLogitBias = 100;

}  // namespace moeserve

#include "engine/validate_request.h"

#include <cmath>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "base/error_text.h"
#include "base/status.h"

namespace moeserve {
namespace {

absl::Status Invalid(std::string_view field, std::string_view expected, double found) {
  return absl::InvalidArgumentError(
      Concat(field, ": expected ", expected, ", found ", std::to_string(found)));
}

absl::Status ValidateIds(std::string_view field, std::span<const TokenId> ids, int vocab_size) {
  for (TokenId id : ids) {
    if (id < 0 || id >= vocab_size) {
      return Invalid(field, Concat("token ids below ", vocab_size), id);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateNumbers(std::span<const SamplingField> fields, const SamplingParams& p) {
  for (const SamplingField& field : fields) {
    const double value = field.Get(p);
    if (!field.Accepts(value)) return Invalid(field.name, RangeText(field), value);
  }
  return absl::OkStatus();
}

absl::Status ValidateLogitChanges(const SamplingParams& p, int vocab_size) {
  MOESERVE_RETURN_IF_ERROR(ValidateNumbers(kPenaltyFields, p));
  for (const auto& [id, bias] : p.logit_bias) {
    MOESERVE_RETURN_IF_ERROR(ValidateIds("logit_bias", {&id, 1}, vocab_size));
    if (!(std::abs(bias) <= kMaxLogitBias)) {
      return Invalid("logit_bias", Concat(-kMaxLogitBias, " to ", kMaxLogitBias), bias);
    }
  }
  MOESERVE_RETURN_IF_ERROR(ValidateIds("allowed_token_ids", p.allowed_token_ids, vocab_size));
  for (const std::vector<TokenId>& word : p.bad_words) {
    if (word.empty()) return absl::InvalidArgumentError("bad_words: expected a token or more");
    MOESERVE_RETURN_IF_ERROR(ValidateIds("bad_words", word, vocab_size));
  }
  if (p.min_tokens > p.max_tokens) return Invalid("min_tokens", "0 to max_tokens", p.min_tokens);
  return absl::OkStatus();
}

// Beam search draws nothing, so what changes draws cannot be obeyed.
absl::Status ValidateBeam(const SamplingParams& p) {
  const BeamParams& beam = *p.beam;
  if (beam.num_beams < 1 || beam.num_beams > kMaxBeams) {
    return Invalid("num_beams", Concat("1 to ", kMaxBeams), beam.num_beams);
  }
  if (!(std::abs(beam.length_penalty) <= kMaxLengthPenalty)) {
    return Invalid("length_penalty", Concat(-kMaxLengthPenalty, " to ", kMaxLengthPenalty),
                   beam.length_penalty);
  }
  if (p.max_tokens < 1) return Invalid("max_tokens", "1 or more with beam search", p.max_tokens);
  if (p.temperature != 0.0 && p.temperature != 1.0) {
    return Invalid("temperature", "1 or 0 with beam search", p.temperature);
  }
  if (p.top_p != 1.0) return Invalid("top_p", "1 with beam search", p.top_p);
  if (p.top_k > 0) return Invalid("top_k", "0 or -1 with beam search", p.top_k);
  if (p.min_p != 0.0) return Invalid("min_p", "0 with beam search", p.min_p);
  if (p.seed.has_value()) {
    return absl::InvalidArgumentError(
        Concat("seed: expected none with beam search, found ", *p.seed));
  }
  return absl::OkStatus();
}

absl::Status ValidateSampling(const SamplingParams& p, const RequestLimits& limits) {
  MOESERVE_RETURN_IF_ERROR(ValidateNumbers(kDrawFields, p));
  if (p.beam.has_value()) MOESERVE_RETURN_IF_ERROR(ValidateBeam(p));
  if (p.max_tokens < 0) return Invalid("max_tokens", "0 or more", p.max_tokens);
  for (const auto& top : {p.logprobs, p.prompt_logprobs}) {
    if (top.has_value() && *top < 0) return Invalid("logprobs", "0 or more", *top);
  }
  for (const std::string& s : p.stop) {
    if (s.empty()) return absl::InvalidArgumentError("stop: expected a non-empty string");
  }
  if (!p.stop.empty() && !limits.has_tokenizer) {
    return absl::InvalidArgumentError("stop: this model was loaded without a tokenizer");
  }
  MOESERVE_RETURN_IF_ERROR(ValidateIds("stop_token_ids", p.stop_token_ids, limits.vocab_size));
  return ValidateLogitChanges(p, limits.vocab_size);
}

}  // namespace

absl::Status ValidateRequest(const Request& request, const RequestLimits& limits) {
  if (request.prompt.empty()) return absl::InvalidArgumentError("prompt: expected a token or more");
  MOESERVE_RETURN_IF_ERROR(ValidateIds("prompt", request.prompt, limits.vocab_size));
  MOESERVE_RETURN_IF_ERROR(ValidateIds("prediction", request.prediction, limits.vocab_size));
  // Each step searches in it.
  if (std::ssize(request.prediction) > limits.max_model_len) {
    return absl::InvalidArgumentError(Concat("prediction: expected at most ", limits.max_model_len,
                                             " tokens, found ", request.prediction.size()));
  }
  if (std::abs(request.priority) > kMaxPriority) {
    return Invalid("priority", Concat(-kMaxPriority, " to ", kMaxPriority), request.priority);
  }
  if ((request.expert_counts || request.routing_record) && !limits.routing_records) {
    return absl::InvalidArgumentError("routing: this server keeps no routing records");
  }
  if (request.routing_control != nullptr && !limits.routing_control) {
    return absl::InvalidArgumentError("routing_control: not allowed on this server");
  }
  MOESERVE_RETURN_IF_ERROR(ValidateSampling(request.sampling, limits));
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t total = prompt + request.sampling.max_tokens;
  if (total > limits.max_model_len) {
    return absl::InvalidArgumentError(
        Concat("context length: the limit is ", limits.max_model_len, " tokens, found ", prompt,
               " in the prompt and max_tokens ", request.sampling.max_tokens));
  }
  return absl::OkStatus();
}

}  // namespace moeserve

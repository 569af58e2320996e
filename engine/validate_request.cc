#include "engine/validate_request.h"

#include <cmath>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"

namespace moeserve {
namespace {

absl::Status Invalid(const std::string& field, const std::string& expected, double found) {
  std::string number = std::to_string(found);
  return absl::InvalidArgumentError(field + ": expected " + expected + ", found " + number);
}

absl::Status ValidateIds(const std::string& field, std::span<const TokenId> ids, int vocab_size) {
  for (TokenId id : ids) {
    if (id < 0 || id >= vocab_size) {
      return Invalid(field, "token ids below " + std::to_string(vocab_size), id);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateChangesOfLogits(const SamplingParams& p, int vocab_size) {
  for (const auto& [name, penalty] : {std::pair{"presence_penalty", p.presence_penalty},
                                      std::pair{"frequency_penalty", p.frequency_penalty}}) {
    if (!(penalty >= -2.0 && penalty <= 2.0)) return Invalid(name, "-2 to 2", penalty);
  }
  if (!(p.repetition_penalty > 0.0 && p.repetition_penalty <= 100.0)) {
    return Invalid("repetition_penalty", "above 0, at most 100", p.repetition_penalty);
  }
  for (const auto& [id, bias] : p.logit_bias) {
    MOESERVE_RETURN_IF_ERROR(ValidateIds("logit_bias", {&id, 1}, vocab_size));
    if (!(bias >= -100.0f && bias <= 100.0f)) return Invalid("logit_bias", "-100 to 100", bias);
  }
  MOESERVE_RETURN_IF_ERROR(ValidateIds("allowed_token_ids", p.allowed_token_ids, vocab_size));
  for (const std::vector<TokenId>& word : p.bad_words) {
    if (word.empty()) return absl::InvalidArgumentError("bad_words: expected a token or more");
    MOESERVE_RETURN_IF_ERROR(ValidateIds("bad_words", word, vocab_size));
  }
  if (p.min_tokens < 0 || p.min_tokens > p.max_tokens) {
    return Invalid("min_tokens", "0 to max_tokens", p.min_tokens);
  }
  return absl::OkStatus();
}

absl::Status ValidateSampling(const SamplingParams& p, const RequestLimits& limits) {
  if (!(p.temperature >= 0.0 && p.temperature <= 100.0)) {
    return Invalid("temperature", "0 to 100", p.temperature);
  }
  if (p.top_k < 0) return Invalid("top_k", "0 (off) or more", p.top_k);
  if (!(p.top_p > 0.0 && p.top_p <= 1.0)) return Invalid("top_p", "(0, 1]", p.top_p);
  if (!(p.min_p >= 0.0 && p.min_p <= 1.0)) return Invalid("min_p", "[0, 1]", p.min_p);
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
  return ValidateChangesOfLogits(p, limits.vocab_size);
}

}  // namespace

absl::Status ValidateRequest(const Request& request, const RequestLimits& limits) {
  if (request.prompt.empty()) return absl::InvalidArgumentError("prompt: expected a token or more");
  MOESERVE_RETURN_IF_ERROR(ValidateIds("prompt", request.prompt, limits.vocab_size));
  if (std::abs(request.priority) > kMaxPriority) {
    return Invalid("priority", "-1000 to 1000", request.priority);
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
    return absl::InvalidArgumentError("context length: the limit is " +
                                      std::to_string(limits.max_model_len) + " tokens, found " +
                                      std::to_string(prompt) + " in the prompt and max_tokens " +
                                      std::to_string(request.sampling.max_tokens));
  }
  return absl::OkStatus();
}

}  // namespace moeserve

#include "engine/validate_request.h"

#include <cmath>
#include <string>

#include "kernels/base/status.h"

namespace moeserve {
namespace {

absl::Status Invalid(const std::string& field, const std::string& expected, double found) {
  std::string number = std::to_string(found);
  return absl::InvalidArgumentError(field + ": expected " + expected + ", found " + number);
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
  for (TokenId id : p.stop_token_ids) {
    if (id < 0 || id >= limits.vocab_size) {
      return Invalid("stop_token_ids", "ids below " + std::to_string(limits.vocab_size), id);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRequest(const Request& request, const RequestLimits& limits) {
  if (request.prompt.empty()) return absl::InvalidArgumentError("prompt: expected a token or more");
  for (TokenId id : request.prompt) {
    if (id < 0 || id >= limits.vocab_size) {
      return Invalid("prompt", "token ids below " + std::to_string(limits.vocab_size), id);
    }
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

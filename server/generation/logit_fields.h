// The request fields that change logits before a token is chosen, and their bounds, for HTTP and
// gRPC alike.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "model_loaders/loader.h"
#include "nlohmann/json.hpp"
#include "server/base/limits.h"

namespace moeserve::server {

// What these fields are judged by.
struct LogitFieldRules {
  const RequestLimits& limits;
  const GenerationDefaults& defaults;
  const Tokenizer* tokenizer = nullptr;  // null: bad_words are refused
  int vocab_size = 0;
};

// Reads presence_penalty, frequency_penalty, repetition_penalty, logit_bias, allowed_token_ids,
// bad_words and min_tokens of a JSON body. The error names the field.
absl::Status ParseLogitFields(const nlohmann::json& body, const LogitFieldRules& rules,
                              SamplingParams& out);

// The token sequences that spell `words`, each at the start of a text and after a space.
Result<std::vector<std::vector<TokenId>>> EncodeBadWords(const std::vector<std::string>& words,
                                                         const LogitFieldRules& rules);

}  // namespace moeserve::server

// The body of POST /v1/completions: from JSON to engine requests, in two steps that need no socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/request.h"
#include "kernels/base/status.h"
#include "nlohmann/json.hpp"
#include "server/sampling_fields.h"

namespace moeserve::server {

struct PromptInput {
  bool is_text = false;
  std::string text;
  std::vector<TokenId> ids;
};

struct CompletionParams : SharedParams {
  std::vector<PromptInput> prompts;
  std::optional<int> max_tokens;  // absent: the default, clamped to what fits
  bool echo = false;
  std::optional<int> logprobs;
  bool add_special_tokens = true;
};

// The error names the field. NotFound: a model that is not served.
Result<CompletionParams> ParseCompletion(const nlohmann::json& body, const RequestRules& rules);

struct PreparedPrompt {
  std::vector<TokenId> ids;
  std::string echo_text;  // set where echo was asked for
  int max_tokens = 0;
};

// Encodes the prompts and fits them into the context. `tokenizer` may be null.
Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const Tokenizer* tokenizer, int max_model_len);

// Checks one prompt against the context length. `max_tokens` absent: kDefaultMaxTokens, clamped.
// Returns the number of tokens to generate.
Result<int> FitIntoContext(size_t prompt_tokens, std::optional<int> max_tokens, int max_model_len);

inline constexpr int kDefaultMaxTokens = 16;

// One engine request for each choice, in order of index (prompt * n + sample).
std::vector<Request> MakeEngineRequests(const CompletionParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline);

}  // namespace moeserve::server

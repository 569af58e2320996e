// The body of POST /v1/completions: from JSON to engine requests, in two steps that need no socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/request.h"
#include "kernels/base/status.h"
#include "model_loaders/loader.h"
#include "nlohmann/json.hpp"
#include "server/limits.h"

namespace moeserve::server {

struct PromptInput {
  bool is_text = false;
  std::string text;
  std::vector<TokenId> ids;
};

struct CompletionParams {
  std::string model;  // the served name that was asked for
  std::vector<PromptInput> prompts;
  SamplingParams sampling;        // max_tokens, logprobs and prompt_logprobs are set per prompt
  std::optional<int> max_tokens;  // absent: the default, clamped to what fits
  int n = 1;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool echo = false;
  std::optional<int> logprobs;
  bool add_special_tokens = true;
  std::optional<int> truncate_prompt_tokens;  // -1: as many as fit
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  std::string request_id;  // of the body; empty: none
  int ignored_fields = 0;
};

// What the parser has to know of the server.
struct CompletionRules {
  RequestLimits limits;
  std::vector<std::string> served_names;  // not empty; the first is the default
  GenerationDefaults defaults;            // replace those of the API
  int vocab_size = 0;
  bool strict_fields = false;  // unknown fields are an error
};

// The error names the field. NotFound: a model that is not served.
Result<CompletionParams> ParseCompletion(const nlohmann::json& body, const CompletionRules& rules);

// `requested` empty: the first served name. NotFound, code model_not_found, for any other.
Result<std::string> ResolveModel(const std::string& requested,
                                 const std::vector<std::string>& served_names);

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

// From the parameters of a request and its prompts to engine requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/request.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

struct PromptInput {
  bool is_text = false;
  std::string text;
  std::vector<TokenId> ids;
};

struct CompletionParams : GenerationParams {
  std::vector<PromptInput> prompts;
};

struct PreparedPrompt {
  std::vector<TokenId> ids;
  std::string echo_text;  // if the request asked for echo
  int max_tokens = 0;
};

// Drops tokens from the left so that `truncate_prompt_tokens` remain; returns whether it dropped
// any. -1 keeps as many as leave room for `max_tokens`, or for kDefaultMaxTokens.
bool TruncatePrompt(const GenerationParams& params, int max_model_len, std::vector<TokenId>& ids);

// Checks one prompt against the context length. Returns the number of tokens to generate.
Result<int> FitIntoContext(const GenerationParams& params, size_t prompt_tokens, int max_model_len);

// Encodes the prompts and fits them into the context. `tokenizer` may be null.
Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const Tokenizer* tokenizer, int max_model_len);

// Refuses requests whose routing records, of all choices together, would get too long.
absl::Status CheckRecordSize(const GenerationParams& params,
                             const std::vector<PreparedPrompt>& prompts, const ModelSpec& spec,
                             int64_t max_routes);

// Returns one engine request per choice, in order of prompt * n + sample.
std::vector<Request> MakeEngineRequests(const GenerationParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline);

}  // namespace moeserve::server

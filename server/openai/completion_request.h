// The body of POST /v1/completions: from JSON to prompts, in two steps that need no socket.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"
#include "server/generation/generation_request.h"

namespace moeserve::server {

struct PromptInput {
  bool is_text = false;
  std::string text;
  std::vector<TokenId> ids;
};

struct CompletionParams : GenerationParams {
  std::vector<PromptInput> prompts;
};

// The error names the field. NotFound: a model that is not served.
Result<CompletionParams> ParseCompletion(const nlohmann::json& body, const RequestRules& rules);

// Encodes the prompts and fits them into the context. `tokenizer` may be null.
Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const Tokenizer* tokenizer, int max_model_len);

}  // namespace moeserve::server

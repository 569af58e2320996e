// Converts the parameters and the prompts of an API request to engine requests.
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
  std::string echo_text;  // the prompt's text, if the request asked for echo
  int max_tokens = 0;
};

// Drops tokens from the start of `ids` so that `truncate_prompt_tokens` remain; returns whether
// tokens were dropped. With -1, keeps as many tokens as leave space in the context for
// `max_tokens`, or for kDefaultMaxTokens if `max_tokens` is absent.
bool TruncatePrompt(const GenerationParams& params, int max_model_len, std::vector<TokenId>& ids);

// Checks that one prompt and the requested output fit into the context. Returns the number of
// tokens to generate.
Result<int> FitIntoContext(const GenerationParams& params, size_t prompt_tokens, int max_model_len);

// Encodes the prompts, truncates them if requested and checks that they fit into the context.
// `tokenizer` may be null if all prompts are token ids.
Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const Tokenizer* tokenizer, int max_model_len);

// Returns an error if the routing records of all choices together could have more than `max_routes`
// (row, expert) pairs.
absl::Status CheckRecordSize(const GenerationParams& params,
                             const std::vector<PreparedPrompt>& prompts, const ModelSpec& spec,
                             int64_t max_routes);

// Returns an estimate of the memory, in bytes, that a request holds from its admission to its end:
// its prompts, for every choice, and the parts of the answer about them. Generated tokens are not
// included.
size_t AdmissionBytes(const GenerationParams& params, const std::vector<PreparedPrompt>& prompts,
                      const ModelSpec& spec);

// Returns one engine request per choice. Choice prompt * n + sample is sample number `sample` of
// prompt number `prompt`.
std::vector<Request> MakeEngineRequests(const GenerationParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline);

}  // namespace moeserve::server

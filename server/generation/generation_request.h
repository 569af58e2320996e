// From the fields of a generating endpoint and its prompts to engine requests.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/request.h"
#include "nlohmann/json.hpp"
#include "server/generation/constraint_compiler.h"
#include "server/generation/sampling_fields.h"

namespace moeserve::server {

inline constexpr int kDefaultMaxTokens = 16;

// What completions and chats have in common, beside their prompts.
struct GenerationParams : SharedParams {
  std::string_view prompt_field = "prompt";  // what errors about the prompt's length name
  std::optional<int> max_tokens;
  int default_max_tokens = kDefaultMaxTokens;  // where that is absent; clamped to what fits
  bool add_special_tokens = true;
  bool echo = false;
  std::optional<int> logprobs;         // alternatives beside each generated token
  std::optional<int> prompt_logprobs;  // beside each prompt token
};

// Reads `prompt_logprobs`, which a stream cannot have.
absl::Status ParsePromptLogprobs(const nlohmann::json& body, const RequestRules& rules,
                                 GenerationParams& out);

// Compiles the constraint that the request asks for, if any, into `params.sampling`. Can take as
// long as ConstraintLimits allows.
absl::Status CompileConstraint(ConstraintCompiler& compiler, SharedParams& params);

struct PreparedPrompt {
  std::vector<TokenId> ids;
  std::string echo_text;  // set where echo was asked for
  int max_tokens = 0;
};

// Drops tokens from the left as `truncate_prompt_tokens` says; true if there were such. -1 keeps
// what leaves room for `max_tokens`, or for kDefaultMaxTokens.
bool TruncatePrompt(const GenerationParams& params, int max_model_len, std::vector<TokenId>& ids);

// Checks one prompt against the context length. Returns the number of tokens to generate.
Result<int> FitIntoContext(const GenerationParams& params, size_t prompt_tokens, int max_model_len);

// Checks how long the routing records of all choices can get, if they are asked for.
absl::Status CheckRecordSize(const GenerationParams& params,
                             const std::vector<PreparedPrompt>& prompts, const ModelSpec& spec,
                             bool stream, int64_t max_routes);

// One engine request for each choice, in order of index (prompt * n + sample).
std::vector<Request> MakeEngineRequests(const GenerationParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline);

}  // namespace moeserve::server

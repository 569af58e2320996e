// The JSON fields that completions and chats share: the model, sampling, streaming and others.
#pragma once

#include "absl/status/status.h"
#include "server/base/json.h"
#include "server/fields/request_fields.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// Reads the shared fields of the object `body` and checks all others (request_fields.h). `route` is
// kCompletions or kChat, to which the bodies of other routes are converted. An error names the
// field. NotFound for a model that is not served. `text`: as for ParseConstraint().
absl::Status ParseSharedFields(const Json& body, const RequestRules& rules, FieldRoute route,
                               GenerationParams& out, std::string_view text = {});

// Reads what says whose request it is and how it is served: `request_id`, `cache_salt`, `priority`.
absl::Status ParseIdentity(const Json& body, const RequestRules& rules, GenerationParams& out);

// Reads `prompt_logprobs`, which streamed requests must not have.
absl::Status ParsePromptLogprobs(const Json& body, const RequestRules& rules,
                                 GenerationParams& out);

}  // namespace moeserve::server

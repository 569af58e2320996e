// The JSON fields that completions and chats share: which model, how to sample, how to stream.
#pragma once

#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// Reads the shared fields of `body`, an object, and refuses known fields that are not supported.
// `own_fields` are those that the caller reads; all others are unknown: an error if the rules are
// strict, else counted in `out.ignored_fields`. The error names the field. NotFound: a model that
// is not served.
absl::Status ParseSharedFields(const nlohmann::json& body, const RequestRules& rules,
                               std::span<const std::string_view> own_fields, GenerationParams& out);

// Reads `prompt_logprobs`, which a stream cannot have.
absl::Status ParsePromptLogprobs(const nlohmann::json& body, const RequestRules& rules,
                                 GenerationParams& out);

}  // namespace moeserve::server

// The JSON fields that completions and chats share: the model, sampling, streaming and others.
#pragma once

#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// Reads the shared fields of the object `body`. Refuses known fields that are not supported.
// `own_fields` lists the fields that the caller reads itself. Any other field is unknown: an error
// if the rules are strict, else counted in `out.ignored_fields`. An error names the field. NotFound
// for a model that is not served. `text`: as for ParseConstraint().
absl::Status ParseSharedFields(const nlohmann::json& body, const RequestRules& rules,
                               std::span<const std::string_view> own_fields, GenerationParams& out,
                               std::string_view text = {});

// Returns the names of the fields that ParseSharedFields() reads, without those of sampling.
std::span<const std::string_view> SharedFields();

// Reads `prompt_logprobs`, which streamed requests must not have.
absl::Status ParsePromptLogprobs(const nlohmann::json& body, const RequestRules& rules,
                                 GenerationParams& out);

}  // namespace moeserve::server

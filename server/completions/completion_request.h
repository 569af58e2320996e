// The body of POST /v1/completions.
#pragma once

#include "base/status.h"
#include "server/base/json.h"
#include "server/generation/generation_request.h"

namespace moeserve::server {

// Parses the body of a completion request. An error names the field. NotFound for a model that is
// not served. `text`: as for ParseConstraint().
Result<CompletionParams> ParseCompletion(const Json& body, const RequestRules& rules,
                                         std::string_view text = {});

}  // namespace moeserve::server

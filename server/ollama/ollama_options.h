// The object `options` of Ollama's requests.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "server/base/json.h"
#include "server/ollama/ollama_request.h"

namespace moeserve::server {

// Adds the fields that `options` sets to out.body, and warnings to out.warnings. An option that
// this server cannot obey is an error that names it, unless its value means that it is off; an
// option that nobody knows is one if `strict`, else counted. Values are checked when out.body is
// parsed.
absl::Status ConvertOllamaOptions(const Json& options, bool strict, OllamaRequest& out);

}  // namespace moeserve::server

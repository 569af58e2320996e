// The schemas that the description at /openapi.json refers to.
#pragma once

#include "nlohmann/json.hpp"
#include "server/context.h"

namespace moeserve::server::http {

// Add schemas by their names to the object `out`. Limits in requests are those of `settings`.
void AddGenerationSchemas(const ServerSettings& settings, nlohmann::ordered_json& out);
void AddServerSchemas(nlohmann::ordered_json& out);

// Returns the parameters of paths, queries and headers by their names.
nlohmann::ordered_json Parameters();

}  // namespace moeserve::server::http

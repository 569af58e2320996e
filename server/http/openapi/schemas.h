// The schemas that the description at /openapi.json refers to.
#pragma once

#include "server/base/json.h"
#include "server/context.h"

namespace moeserve::server::http {

// Add schemas by their names to the object `out`. Limits in requests are those of `settings`.
void AddGenerationSchemas(const ServerSettings& settings, OrderedJson& out);
void AddEncodeSchemas(OrderedJson& out);
void AddServerSchemas(OrderedJson& out);

// Returns the parameters of paths, queries and headers by their names.
OrderedJson Parameters();

}  // namespace moeserve::server::http

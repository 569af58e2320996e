// GET /openapi.json: the description of the HTTP interface in OpenAPI 3.1.
#pragma once

#include "server/base/json.h"
#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// Returns the description of the routes that `router` has.
OrderedJson OpenApiDocument(const Router& router, const ServerSettings& settings);

// Adds the route of the description. Must be called after all other routes are added. `context`
// must outlive the call.
void AddOpenApi(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

// POST /v1/models/load and /v1/models/unload: clients load, replace and unload models.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddModelRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

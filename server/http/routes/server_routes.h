// What the server tells about itself: GET and POST /ping, GET /server_info, GET /tokenizer_info,
// GET /v1/metrics/history.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddServerRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

// What the server tells about itself: GET and POST /ping, GET /server_info, GET /tokenizer_info.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddServerRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

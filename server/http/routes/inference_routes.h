// The routes of the Open Inference Protocol, version 2: /v2, /v2/models/*, /v2/repository/*. Their
// errors are {"error": MESSAGE}, as clients of the protocol expect.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddInferenceRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

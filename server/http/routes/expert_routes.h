// GET /v1/experts/tokens, /similarity, /collapse and /profile: expert statistics that are slower to
// compute than those of /v1/experts/stats.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddExpertRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

// GET /v1/experts/tokens, /similarity, /collapse and /profile: expert statistics that are slower to
// compute than those of /v1/experts/stats.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// Returns the model that the parameter "model" of the query names, or the first one that the
// request's key may use. Errors: those of ServerContext::LoadedModelFor().
Result<std::shared_ptr<ServedModel>> QueriedModel(const Request& request,
                                                  const ServerContext& context);

// `context` must outlive the router.
void AddExpertRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

// GET /v1/experts/tokens, /similarity, /collapse and /profile: expert statistics that are slower to
// compute than those of /v1/experts/stats.
#pragma once

#include "server/context.h"
#include "server/http/router.h"
#include "server/reports/stack_experts.h"

namespace moeserve::server::http {

// Returns the model that the parameter "model" of the query names, or the first one that the
// request's key may use. Errors: those of ServerContext::LoadedModelFor().
Result<std::shared_ptr<ServedModel>> QueriedModel(const Request& request,
                                                  const ServerContext& context);

// Returns the stack that the parameter "stack" of the query names: "encoder" or "decoder". Without
// it, returns the model's decoder, or its only stack. `engine` must outlive the result.
// InvalidArgument for a stack that the model does not have.
Result<StackExperts> QueriedStack(const Request& request, const Engine& engine);

// `context` must outlive the router.
void AddExpertRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

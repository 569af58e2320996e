// Implements gRPC's reflection, v1 and v1alpha: clients such as grpcurl ask it for the interface of
// the server. gRPC's own plugin would answer without an API key.
#pragma once

#include "server/context.h"
#include "server/rpc/router.h"

namespace moeserve::server::rpc {

// Adds the calls of both versions to `router`. `server` must outlive every call.
void AddReflection(Router& router, ServerContext& server);

}  // namespace moeserve::server::rpc

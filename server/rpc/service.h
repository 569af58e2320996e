// Implements the service of proto/moeserve/v1/moeserve.proto.
#pragma once

#include "server/context.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/router.h"

namespace moeserve::server::rpc {

// Adds the calls of the service to `router`. `server` and `dispatcher` must outlive every call.
void AddInference(Router& router, ServerContext& server, Dispatcher& dispatcher);

}  // namespace moeserve::server::rpc

// All routes of the HTTP interface with their handlers.
#pragma once

#include <memory>

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
std::unique_ptr<Router> MakeRouter(ServerContext& context);

}  // namespace moeserve::server::http

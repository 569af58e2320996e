// The HTTP interface: every route and its handler.
#pragma once

#include <memory>

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` outlives the router.
std::unique_ptr<Router> MakeRouter(ServerContext& context);

}  // namespace moeserve::server::http

// The routes of Ollama's API that generate nothing. Those that generate are chat routes.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddOllamaRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

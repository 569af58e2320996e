// The routes that compute something of texts: /v1/embeddings, /pooling, /classify, /score, /rerank
// and /v1/fill-mask, with their aliases, and TEI's /embed, /embed_all, /predict, /similarity and
// /info.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddEncodeRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

// The routes of chats: /v1/chat/completions, /v1/responses and /v1/messages.
#pragma once

#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

void AddChatRoutes(Router& router, ServerContext& context);

}  // namespace moeserve::server::http

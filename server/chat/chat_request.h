// The body of POST /v1/chat/completions.
#pragma once

#include <ctime>

#include "base/status.h"
#include "nlohmann/json.hpp"
#include "server/generation/generation_request.h"
#include "server/chat/chat_conversation.h"
#include "server/chat/chat_format.h"

namespace moeserve::server {

struct ChatParams : GenerationParams {
  Conversation conversation;
};

// Parses the body of a chat request. An error names the field. NotFound for a model that is not
// served.
Result<ChatParams> ParseChat(const nlohmann::json& body, const RequestRules& rules,
                             bool allow_request_template);

// Renders and encodes the conversation and checks that it fits into the context. InvalidArgument if
// `tokenizer` is null. Takes up to about a second.
Result<PreparedPrompt> PrepareChat(const ChatParams& params, const ChatFormat& format,
                                   const Tokenizer* tokenizer, const RequestLimits& limits,
                                   int max_model_len, std::time_t now);

}  // namespace moeserve::server

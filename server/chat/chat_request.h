// The body of POST /v1/chat/completions.
#pragma once

#include <ctime>
#include <string_view>

#include "base/status.h"
#include "server/base/json.h"
#include "server/chat/chat_conversation.h"
#include "server/chat/chat_format.h"
#include "server/generation/generation_request.h"

namespace moeserve::server {

struct ChatParams : GenerationParams {
  Conversation conversation;
  bool include_reasoning = true;  // whether the response has the model's reasoning
  SplitRules split;               // how the answer is read; PrepareChat() sets it
};

// Parses the body of a chat request. `text` is the JSON from which `body` was parsed. An error
// names the field. NotFound for a model that is not served.
Result<ChatParams> ParseChat(const Json& body, std::string_view text, const RequestRules& rules,
                             bool allow_request_template);

// Renders and encodes the conversation and checks that it fits into the context. Makes
// the constraint of `params` describe the whole answer: the client's format applies to its content,
// not to its reasoning, and calls of tools are valid. InvalidArgument if `tokenizer` is null. Takes
// up to about a second.
Result<PreparedPrompt> PrepareChat(ChatParams& params, const ChatFormat& format,
                                   const Tokenizer* tokenizer, const RequestLimits& limits,
                                   int max_model_len, std::time_t now,
                                   std::string_view context_reason = "");

}  // namespace moeserve::server

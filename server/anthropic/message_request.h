// The body of POST /v1/messages, the form of Anthropic's API, converted to that of a chat.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/base/json.h"

namespace moeserve::server {

struct MessageRequest {
  OrderedJson chat;                   // the body of the chat request that generates the answer
  int ignored_fields = 0;             // number of unknown fields
  std::vector<std::string> warnings;  // about fields that have no effect
};

// Converts the body of a request. `body` was parsed from `text`, from which the order of members is
// read. `counts_only` is for POST /v1/messages/count_tokens, which has no `max_tokens`. An error
// names the field. What the chat request has in common with this one is checked when the chat is
// parsed.
Result<MessageRequest> ParseMessageRequest(const Json& body, std::string_view text,
                                           bool counts_only, bool strict_fields);

// Returns the name of the field of this API that corresponds to a field of the chat request, for
// error messages.
std::string MessageParam(std::string_view chat_param);

}  // namespace moeserve::server

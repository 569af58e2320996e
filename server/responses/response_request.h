// The body of POST /v1/responses, converted to that of a chat.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "server/base/json.h"

namespace moeserve::server {

// A request of the Responses API.
struct ResponseRequest {
  OrderedJson chat;  // the body of the chat request that generates the answer
  // The members of the response that repeat the request, such as "instructions" and "tools".
  OrderedJson echo = OrderedJson::object();
  // The names of the tools of the type custom, whose input is a text. The chat has them as
  // functions with one argument (kCustomInput).
  std::vector<std::string> custom_tools;
  int ignored_fields = 0;             // number of unknown fields
  std::vector<std::string> warnings;  // about fields that have no effect
};

inline constexpr char kCustomInput[] = "input";

// Converts the body of a request. `body` was parsed from `text`, from which the order of members is
// read. An error names the field. What the chat request has in common with this one (sampling,
// tools, limits) is checked when the chat is parsed.
Result<ResponseRequest> ParseResponseRequest(const Json& body, std::string_view text,
                                             bool strict_fields);

// Returns the name of the field of this API that corresponds to a field of the chat request, for
// error messages.
std::string ResponseParam(std::string_view chat_param);

}  // namespace moeserve::server

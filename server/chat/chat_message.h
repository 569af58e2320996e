// One message of a chat request.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/base/json.h"
#include "server/chat/chat_conversation.h"

namespace moeserve::server {

// What the messages of one request have in common.
struct MessageTotals {
  // The JSON text of each message; empty if it is not known.
  std::vector<std::string_view> texts;
  int ignored_fields = 0;      // number of unknown fields
  size_t argument_memory = 0;  // estimate of the memory, in bytes, of the arguments of calls
  std::vector<std::string> argument_texts;  // Conversation::argument_texts
};

// The largest value of MessageTotals::argument_memory.
inline constexpr size_t kMaxArgumentMemory = size_t{32} << 20;

// Converts message number `index` of a request to the form that chat templates receive
// (history_form.h changes it to what a template expects): an object with "role" (system, developer,
// user, assistant or tool), "content" (a string) and, if the message has them, "name",
// "reasoning_content", "tool_call_id" and "tool_calls": objects {"id", "type", "function": {"name",
// "arguments"}} whose arguments are an object, in the order of the client's text. Adds to `totals`.
// Errors name the field.
Result<OrderedJson> ParseMessage(const Json& message, size_t index, const ConversationRules& rules,
                                 MessageTotals& totals);

}  // namespace moeserve::server

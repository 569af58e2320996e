// Tools for models whose chat template does not mention them.
#pragma once

#include <string_view>

#include "server/base/json.h"
#include "server/tools/call_syntax.h"

namespace moeserve::server {

// Returns whether a chat template tells the model about tools by itself.
bool RendersTools(std::string_view template_source);

enum class ToolText { kInSystemMessage, kInUserMessage };

// Returns `messages` in a form that every template takes: the tools and the form of a call are
// described in the system message, or in the first user message for templates that refuse system
// messages; calls are text of the assistant, results of tools are text of the user. `definitions`
// and `messages` are as in Conversation.
OrderedJson DescribeTools(const OrderedJson& definitions, const OrderedJson& messages,
                          const CallSyntax& syntax, ToolText place);

}  // namespace moeserve::server

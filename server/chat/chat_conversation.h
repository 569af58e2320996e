// Parses the messages of a chat request and the fields that select how they are rendered.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/base/json.h"
#include "server/base/limits.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {

struct ConversationRules {
  RequestLimits limits;
  bool allow_template = false;  // whether a request may set chat_template
  bool strict_fields = false;   // whether unknown fields of a message are an error
};

struct Conversation {
  // Objects as ParseMessage() returns them.
  OrderedJson messages = OrderedJson::array();
  // The client's text of the arguments of each call, in the order of `messages`.
  std::vector<std::string> argument_texts;
  ToolSettings tools;
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  bool add_special_tokens = false;
  // How much the model is to reason: none, minimal, low, medium, high or xhigh.
  std::optional<std::string> reasoning_effort;
  std::optional<std::string> chat_template;  // replaces the model's template
  OrderedJson template_variables = OrderedJson::object();
  int ignored_fields = 0;  // number of unknown fields in messages
};

// Returns the names of the fields that ParseConversation() reads.
std::vector<std::string_view> ConversationFields();

// Parses the conversation of a request. `text` is the JSON from which `body` was parsed. An error
// names the field.
Result<Conversation> ParseConversation(const Json& body, std::string_view text,
                                       const ConversationRules& rules);

}  // namespace moeserve::server
